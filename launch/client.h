/* The command line's side of the bus: greets the three daemons, watches that they answer, hands requests to
 * the decoder and its answers to the caller. Belongs to the loop's thread. */
#ifndef LAUNCH_CLIENT_H
#define LAUNCH_CLIENT_H

#include <stdint.h>

#include "base/err.h"
#include "base/loop.h"
#include "proto/msg.h"

enum client_part { CLIENT_KVSTORE, CLIENT_RETRIEVER, CLIENT_DECODER, CLIENT_PARTS };

/* "specontext-kvstore": program and name in messages. */
const char *client_part_program(enum client_part part);
/* "kvstore": socket and key in reports. */
const char *client_part_name(enum client_part part);

struct client;

/* All but `lost` may be NULL. */
struct client_ops {
    void (*attached)(void *arg); /* all three have answered the greeting; once */
    void (*lost)(void *arg, enum client_part part, const char *why); /* silent, refused us, or was replaced */
    void (*progress)(void *arg, uint32_t request, const struct msg_progress *progress);
    void (*tokens)(void *arg, uint32_t request, const struct msg_u32s *tokens);
    void (*done)(void *arg, uint32_t request, const struct msg_done *done); /* the last word on a request */
    void (*report)(void *arg, enum client_part part, const char *json, uint32_t bytes); /* answer to STATUS */
};

/* Connects to the daemons of runtime directory `dir`; they may come later. */
int client_create(struct loop *loop, const char *dir, const struct client_ops *ops, void *arg,
                  struct client **ret_client, struct err *err);
void client_free(struct client **client);

/* Pid that a part told in its greeting, 0 before. */
uint32_t client_part_pid(const struct client *client, enum client_part part);

uint64_t client_epoch(const struct client *client);

/* `request`: any number; it comes back with the answers. 0, -EAGAIN, -ENOTCONN. */
int client_generate(struct client *client, uint32_t request, const struct msg_generate *generate);
int client_cancel(struct client *client, uint32_t request);
int client_ask_status(struct client *client, enum client_part part);

#endif
