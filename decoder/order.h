/* What the decoder's two threads put into each other's mailboxes. Each item belongs to whoever took it. */
#ifndef DECODER_ORDER_H
#define DECODER_ORDER_H

#include <stdint.h>

#include "proto/msg.h"

enum order_kind {                  /* loop -> device */
                  ORDER_GENERATE,  /* id: the request; msg with its memory */
                  ORDER_CANCEL,    /* id */
                  ORDER_STORE,     /* msg: GRANT, CLOSED, ERROR */
                  ORDER_RETRIEVER, /* msg: GRANT, ERROR */
                  ORDER_RETRIEVER_READY,
                  ORDER_RETRIEVER_LOST,
                  ORDER_WAKE,   /* the store rang, or the thread shall end */
                  ORDER_ATTACH, /* device_attach: the store's memory is mapped */
                  ORDER_EXPORT, /* id, msg: epoch and HELLO of another retriever, which reads hidden states */
};

struct order {
    enum order_kind kind;
    uint64_t id;
    struct msg msg;
};

enum post_kind {                 /* device -> loop */
                 POST_CLIENT,    /* msg; msg.id: the request */
                 POST_STORE,     /* msg */
                 POST_RETRIEVER, /* msg */
                 POST_OPENED,    /* text: "cpu", or the UUID of the GPU that was opened */
                 POST_READY,     /* weights and activations are there */
                 POST_EXPORT,    /* fd: a feature segment for the retriever */
                 POST_FATAL,     /* text: why nothing can go on */
};

struct post {
    enum post_kind kind;
    struct msg msg; /* its memory is freed with mem_free */
    char text[ERR_TEXT_MAX];
    int fd;          /* POST_EXPORT: the post's own */
    uint64_t epoch;  /* POST_EXPORT: of the retriever that it was made for */
    unsigned losses; /* POST_RETRIEVER: those that the device thread knew to be gone; it is for the next */
};

#endif
