/* Records of an adopted arena; see adopt.h. Owner: the planner thread, before anything else happens. It
 * must never follow a number out of the arena that it has not compared with its limit. */
#include "kvstore/adopt.h"

#include <string.h>

#include "base/alloc.h"
#include "kvstore/residency.h"

/* SEALED blocks whose hash is that of their ids; all others are 0. */
static void check_blocks(struct planner *p, uint8_t *sealed, struct adopt_report *report)
{
    for (uint32_t i = 0; i < p->blocks.present; i++) {
        const struct arena_block *b = arena_block_at(p->blocks.header, i);
        if (b->state != ARENA_BLOCK_SEALED)
            continue;
        struct hash128 parent = {b->parent_lo, b->parent_hi};
        struct hash128 hash = prefix_hash(parent, &b->made, b->tokens);
        sealed[i] = hash.lo == b->hash_lo && hash.hi == b->hash_hi;
        report->sealed += sealed[i];
        report->broken += !sealed[i];
    }
}

static bool numbers_sane(const struct planner *p, const struct arena_sequence *r)
{
    uint32_t blocks = r->blocks, tokens = r->tokens, committed = r->committed;
    if (r->id == 0 || r->capacity == 0 || r->capacity > p->layout.context_max ||
        r->prompt_tokens > r->capacity)
        return false;
    if (blocks > sequence_pages(r->capacity) || tokens > blocks * BLOCK_TOKENS || tokens > r->capacity ||
        committed > tokens)
        return false;
    if (r->made.kind != ARENA_MADE_FULL && r->made.kind != ARENA_MADE_SPARSE)
        return false;
    return r->budget == 0 || (uint64_t)r->sinks + r->window + 1 <= r->budget;
}

/* Whole blocks below `committed` are sealed, except that the store may have died before the last ones
 * were. */
static bool blocks_sane(const struct planner *p, const struct arena_sequence *r, const uint8_t *sealed)
{
    uint32_t blocks = r->blocks;
    struct hash128 parent = prefix_root(&p->prefix, r->salt);
    bool open_seen = false;
    for (uint32_t i = 0; i < blocks; i++) {
        uint32_t block = r->block[i];
        if (block >= p->blocks.present)
            return false;
        for (uint32_t j = 0; j < i; j++)
            if (r->block[j] == block)
                return false;
        const struct arena_block *b = arena_block_at(p->blocks.header, block);
        if (sealed[block]) {
            if (open_seen || (i + 1) * BLOCK_TOKENS > r->committed || b->parent_lo != parent.lo ||
                b->parent_hi != parent.hi)
                return false;
            parent = (struct hash128){b->hash_lo, b->hash_hi};
        } else {
            if (b->state != ARENA_BLOCK_FILLING || p->blocks.refs[block] != 0)
                return false; /* free, broken, or another sequence writes to it */
            open_seen = true;
        }
    }
    return true;
}

static void take_sequence(struct planner *p, uint32_t index, const uint8_t *sealed, int64_t now_ns)
{
    struct arena_sequence *r = arena_sequence_at(p->blocks.header, index);
    struct sequence *s = &p->sequences[index];
    sequence_init(s, r, index);
    s->orphan_until_ns = now_ns + PLANNER_ORPHAN_NS;
    for (uint32_t i = 0; i < s->blocks; i++) {
        blocks_ref(&p->blocks, r->block[i]);
        if (!sealed[r->block[i]])
            continue;
        s->sealed = i + 1;
        const struct arena_block *b = arena_block_at(p->blocks.header, r->block[i]);
        if (b->made.kind == ARENA_MADE_SPARSE && s->first_sparse == UINT32_MAX)
            s->first_sparse = i * BLOCK_TOKENS;
    }
    /* Which of the last positions were made sparsely is not recorded: those past the prompt, if any was. */
    if (s->first_sparse == UINT32_MAX && s->budget && s->made.kind == ARENA_MADE_SPARSE)
        s->first_sparse = s->prompt_tokens;
    sequence_publish(s, &p->prefix, s->committed);
}

struct adopt_report adopt_records(struct planner *p, int64_t now_ns)
{
    struct adopt_report report = {0};
    uint8_t *sealed = mem_alloc(p->blocks.present, 1);
    check_blocks(p, sealed, &report);
    for (uint32_t i = 0; i < p->blocks.present; i++)
        if (sealed[i])
            prefix_insert(&p->prefix, i);
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct arena_sequence *r = arena_sequence_at(p->blocks.header, i);
        if (r->state == ARENA_SEQUENCE_LIVE && numbers_sane(p, r) && blocks_sane(p, r, sealed)) {
            take_sequence(p, i, sealed, now_ns);
            report.sequences++;
        } else {
            report.dropped += r->state == ARENA_SEQUENCE_LIVE;
            atomic_store_explicit(&r->state, ARENA_SEQUENCE_FREE, memory_order_release);
        }
    }
    for (uint32_t i = p->blocks.present; i > 0; i--) { /* so that the lowest is taken first */
        if (p->blocks.refs[i - 1] != 0)
            continue;
        if (sealed[i - 1])
            prefix_cache(&p->prefix, i - 1);
        else
            blocks_give(&p->blocks, i - 1);
    }
    mem_free(&sealed);
    return report;
}
