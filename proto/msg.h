/* Messages of the control plane: what they carry, how they are written as msgpack. Dialogs, states and
 * limits: PROTOCOL.md. Pure bytes: no sockets here.
 *
 * On the wire a message is one frame: the msgpack array [kind, version, epoch, id, deadline_ns, body], the
 * body a map with string keys (the field names below). Bulk data (token ids, index sets) travels as `bin` of
 * little-endian u32. Decoding checks the whole frame (framing, depth, counts against the bytes that are
 * left) before it allocates anything, then every field's type and range. Unknown map keys are skipped, an
 * unknown kind is -EPROTO, a version outside [MSG_VERSION_MIN, MSG_VERSION] is -EPROTONOSUPPORT.
 *
 * A decoded message owns one block of memory (msg_free); its pointers lead into it. For encoding, pointers
 * are borrowed. */
#ifndef PROTO_MSG_H
#define PROTO_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"
#include "proto/arena.h"
#include "proto/counters.h"
#include "proto/layout.h"
#include "proto/limits.h"

#define MSG_VERSION     4u
#define MSG_VERSION_MIN 4u

enum msg_kind {
    MSG_HELLO = 1,   /* any -> server, first of a conversation */
    MSG_WELCOME = 2, /* server -> any: accepted, with the server's own identity */
    MSG_ERROR = 3,   /* either way: the message `id` was refused, why; the conversation may be over */
    MSG_PING = 4,    /* either way; any traffic counts as a sign of life */
    MSG_PONG = 5,
    MSG_STATUS = 6, /* any -> server */
    MSG_REPORT = 7, /* answer to STATUS: JSON text */
    MSG_DRAIN = 8,  /* supervisor -> daemon: finish what runs, take nothing new, exit 0 */

    MSG_OPEN = 16,    /* decoder -> store (and -> retriever): a sequence begins */
    MSG_GRANT = 17,   /* store -> decoder: index, tokens that are cached; from a retriever: that have keys */
    MSG_CLOSE = 18,   /* decoder -> store (and -> retriever): it ended */
    MSG_CLOSED = 19,  /* store -> decoder: counters of its life */
    MSG_RESUME = 20,  /* decoder -> store: give me what you hold of sequence id */
    MSG_RESUMED = 21, /* store -> decoder: token ids, committed, index */
    MSG_PREFIX = 22,  /* any -> store: how many of these tokens are cached? */
    MSG_PREFIXED = 23,

    MSG_STEP = 32,     /* decoder -> retriever: tokens of step `id` */
    MSG_TOPK = 33,     /* retriever -> store: selections of step `id` */
    MSG_RESELECT = 34, /* store -> retriever: the base of a difference is unknown here, send full sets */

    MSG_GENERATE = 48, /* gateway or command line -> decoder */
    MSG_PROGRESS = 49, /* decoder -> client: prompt tokens done */
    MSG_TOKEN = 50,    /* decoder -> client: ids that are recorded in the store */
    MSG_CANCEL = 51,   /* client -> decoder */
    MSG_DONE = 52,     /* decoder -> client: finish reason and counters; the last word on request `id` */
};

enum msg_role { ROLE_DECODER = 1, ROLE_RETRIEVER = 2, ROLE_KVSTORE = 3, ROLE_GATEWAY = 4, ROLE_LAUNCH = 5 };

struct msg_bytes {
    const void *data;
    uint32_t bytes;
};

struct msg_u32s { /* travels as bin of little-endian u32 */
    const uint32_t *at;
    uint32_t count;
};

struct msg_hello {        /* HELLO and WELCOME */
    uint32_t role;        /* enum msg_role of the sender */
    uint32_t version_min; /* oldest message version that it speaks */
    uint32_t pid;
    char build[64];
    char device[64]; /* GPU UUID, or "cpu" */
    bool has_layout; /* decoder's and retriever's HELLO: always; store's WELCOME: once it has one */
    struct kv_layout layout;
    struct hash128 tokenizer; /* fingerprint, zero when the sender has none */
    uint64_t head;            /* a retriever's: fingerprint of its head (low half), else 0 */
    bool has_features;
    struct layout_features features; /* a retriever's, when its head reads any */
};

struct msg_error {
    int32_t code; /* negative errno */
    char text[LIMIT_TEXT_BYTES];
};

struct msg_report {
    struct msg_bytes json; /* <= LIMIT_STATUS_BYTES */
};

enum open_flags {
    OPEN_REUSE = 1,        /* may start from cached prefix blocks; a retriever's: from keys that it kept */
    OPEN_REUSE_SPARSE = 2, /* ... also from sparse-made ones with the same `made` */
};

struct msg_open {
    uint64_t sequence; /* the decoder's id, unique in its epoch, != 0 */
    uint32_t flags;    /* enum open_flags; a retriever reads OPEN_REUSE alone, with it salt and tokens */
    uint64_t salt;     /* separates tenants' prefixes; 0 = the shared one */
    struct made made;  /* how KV after the prompt is made */
    uint32_t capacity, reuse_max;   /* positions: of prompt and answer; to take from cached blocks, 0: any */
    uint32_t budget, sinks, window; /* budget: the most positions of a list; 0: dense only */
    /* What the length of a list follows, to the retriever; the store ignores it. PROTOCOL.md section 5. */
    uint32_t budget_base;   /* positions of a list that no mass makes longer or shorter; 0: the budget */
    float min_mass;         /* below it a list grows; 0: none does */
    float top_p;            /* a list ends where its mass reaches this; 0: none does */
    struct msg_u32s tokens; /* the prompt; to a retriever with OPEN_REUSE only, else empty */
};

struct msg_grant {
    uint64_t sequence;
    uint32_t index;  /* into the tables */
    uint32_t cached; /* positions [0, cached) are committed, or have keys; whole blocks, < prompt */
};

struct msg_close {
    uint64_t sequence;
};

/* Adds up; layers at the end are those of `counters`, the most offloaded is the larger one. */
void msg_add_counters(struct kv_counters *sum, const struct kv_counters *counters);

struct msg_closed {
    uint64_t sequence;
    struct kv_counters counters;
};

struct msg_resume {
    uint64_t sequence;
};

struct msg_resumed {
    uint64_t sequence;
    uint32_t index, committed, prompt_tokens, capacity;
    struct made made;
    struct msg_u32s tokens;
};

struct msg_prefix {
    uint64_t salt;
    struct made made;
    struct msg_u32s tokens;
};

struct msg_prefixed {
    uint32_t cached;
};

enum step_entry_flags { STEP_ENTRY_SELECT = 1 }; /* a selection is wanted for the entry's last token */

struct msg_step_entry { /* 24 bytes on the wire, little-endian, in `entries` bin */
    uint64_t sequence;
    uint32_t index;    /* store's index of the sequence, handed through */
    uint32_t position; /* of the first token */
    uint32_t count;
    uint32_t flags;
};

struct msg_step { /* id = step */
    const struct msg_step_entry *entries;
    uint32_t entry_count;     /* <= LIMIT_SEQUENCES */
    struct msg_u32s tokens;   /* of all entries, in order */
    struct msg_u32s features; /* of each entry the first row (SHARED-MEMORY.md section 4), or empty */
    uint32_t reading;         /* number of the message among those that name rows, cyclic */
};

enum topk_entry_flags {
    TOPK_ENTRY_GROWN = 1, /* a list is longer than the base budget */
    TOPK_ENTRY_SHORT = 2  /* a list has less than min_mass and may not grow: attend all where all is there */
};

/* Per entry of TOPK, 40 bytes on the wire. */
struct msg_topk_entry {
    uint64_t sequence;
    uint32_t index;
    uint32_t base_step; /* step of the set that the differences refer to; the step itself: full sets */
    uint32_t limit;     /* named positions are in [sinks, limit); limit = position - window, at least sinks */
    uint32_t position;  /* of the token that the selection was made from */
    float mass;         /* mean share of the head's weight on what the lists name, calibrated */
    float mass_base;    /* the same at the base budget */
    uint32_t flags;     /* enum topk_entry_flags */
    uint32_t pad;
};

/* All positions ascending. For each entry, group, selection head in this order: `added` and `removed` count
 * in `counts` (a full set has removed = 0), and the added, then the removed positions in `positions`. */
struct msg_topk { /* id = step */
    const struct msg_topk_entry *entries;
    uint32_t entry_count;
    uint32_t groups, selection_heads;
    struct msg_u32s counts; /* entry_count x groups x selection_heads x {added, removed} */
    struct msg_u32s positions;
};

struct msg_reselect { /* id = step from which on full sets are wanted */
    uint64_t sequence;
};

struct msg_sampling {
    float temperature;                         /* 0 to 1000; 0: greedy */
    float top_p, min_p;                        /* 0 to 1 */
    float repeat_penalty;                      /* 0 to 1000 */
    float presence_penalty, frequency_penalty; /* -1000 to 1000 */
    uint32_t top_k, repeat_last_n;
    uint64_t seed;
};

enum generate_flags {
    GENERATE_FULL = 1,
    GENERATE_IGNORE_EOS = 2,
    GENERATE_REUSE = 4,
    GENERATE_REUSE_SPARSE = 8
};

struct msg_generate { /* id = the client's request id */
    uint32_t flags;   /* enum generate_flags */
    uint32_t max_tokens;
    uint32_t selection; /* enum selection_mode */
    uint32_t budget, sinks, window;
    uint32_t budget_max;          /* up to which a list may grow for min_mass; 0: the budget */
    float min_mass, budget_top_p; /* as OPEN's min_mass and top_p */
    uint64_t salt;
    struct msg_sampling sampling;
    struct msg_u32s stop_ids; /* beside the model's own, <= LIMIT_STOP_IDS */
    struct msg_u32s tokens;
};

struct msg_progress {
    uint32_t done, total, cached; /* prompt tokens */
};

struct msg_token {
    struct msg_u32s tokens;
};

enum finish_reason { FINISH_STOP = 1, FINISH_LENGTH = 2, FINISH_CANCELLED = 3, FINISH_ERROR = 4 };

struct msg_done {
    uint32_t reason;             /* enum finish_reason */
    int32_t code;                /* FINISH_ERROR: negative errno */
    char text[LIMIT_TEXT_BYTES]; /* ... and why */
    uint32_t prompt_tokens, cached_tokens, generated_tokens;
    int64_t queued_ns, prefill_ns, decode_ns; /* durations; decode: from the first token to the last */
    struct kv_counters counters;
};

struct msg {
    uint32_t kind, version;
    uint64_t epoch;      /* of the sender's process */
    uint64_t id;         /* step or request */
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0 = none; a receiver drops what is past it */
    void *memory;        /* what a decoded message owns */
    union {
        struct msg_hello hello;
        struct msg_error error;
        struct msg_report report;
        struct msg_open open;
        struct msg_grant grant;
        struct msg_close close;
        struct msg_closed closed;
        struct msg_resume resume;
        struct msg_resumed resumed;
        struct msg_prefix prefix;
        struct msg_prefixed prefixed;
        struct msg_step step;
        struct msg_topk topk;
        struct msg_reselect reselect;
        struct msg_generate generate;
        struct msg_progress progress;
        struct msg_token token;
        struct msg_done done;
    };
};

_Static_assert(sizeof(struct msg_step_entry) == 24, "wire");
_Static_assert(sizeof(struct msg_topk_entry) == 40, "wire");

/* Encodes into a fresh buffer of *ret_bytes bytes (free with msg_buffer_free). Fields must be in range:
 * CHECKed. */
void msg_encode(const struct msg *msg, void **ret_buffer, size_t *ret_bytes);
void msg_buffer_free(void *buffer);

/* Decodes one frame. On success *ret_msg is filled and must be released with msg_free. On failure nothing is
 * owned, and kind and id are what was read of them, else 0. -EPROTO, -EPROTONOSUPPORT or -EMSGSIZE with one
 * line in err. */
int msg_decode(const void *frame, size_t bytes, struct msg *ret_msg, struct err *err);
void msg_free(struct msg *msg);

const char *msg_kind_name(uint32_t kind);     /* "OPEN", or "?" */
const char *msg_role_name(uint32_t role);     /* "decoder", or "?" */
const char *msg_finish_name(uint32_t reason); /* "stop", "length", "cancelled", "error" */

/* Whether a message of `kind` may reach a server of role `server` from a peer of role `from` that has (or has
 * not yet) said HELLO. Every other one closes the peer (PROTOCOL.md section 4). */
bool msg_allowed(uint32_t server, uint32_t from, bool greeted, uint32_t kind);

#endif
