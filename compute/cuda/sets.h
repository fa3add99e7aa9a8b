/* Selections kept as sets of bits on the card, and what two of them differ by: launchers as kernels.h says.
 *
 * A place (a sequence's) has two sets for each of its lists. One step writes one of them and compares it with
 * the other, so only what changed leaves the card, and the set before stays until the caller takes the new
 * one for good. Integers decide alone: the same on every run, whatever the batch. */
#ifndef COMPUTE_CUDA_SETS_H
#define COMPUTE_CUDA_SETS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum cuda_sets_how {
    CUDA_SETS_SECOND = 1, /* the second of the two is written, else the first */
    CUDA_SETS_DIFFER = 2, /* compared with the other one, else with an empty set */
};

enum { CUDA_SETS_WORDS_MAX = 4096 }; /* of a set: CUDA_TOPK_MAX positions */

struct cuda_sets {
    uint32_t *bits;              /* [place][list][2][words]: bit p % 32 of word p / 32 is position p */
    uint32_t *count;             /* [query][list][2]: positions added, removed */
    const uint32_t *place, *how; /* [query]; how: enum cuda_sets_how. A place past the last has no changes */
    uint32_t words, lists, place_count;
};

/* Writes the sets of lists as cuda_topk leaves them: row r (index_stride positions apart, row_count[r] of
 * them) is list first_list + r % heads of query first_query + r / heads. Counts what they differ by. Bytes:
 * positions, sets written, sets before read. */
struct cuda_sets_mark {
    struct cuda_sets sets;
    const uint32_t *index, *row_count;
    uint64_t index_stride;
    uint32_t first_query, first_list, rows, heads;
};
int cuda_sets_mark(const struct cuda_sets_mark *mark, struct CUstream_st *stream);

/* The changes of all lists of queries [first, first + n), once all are marked or their counts are 0: list by
 * list the positions added, then those removed, both ascending, without a gap from `out` on. `out` is mapped
 * host memory; `work` and `out` have `room` places, a multiple of 4: what does not fit is left out. `total`:
 * one word. Bytes: sets read, positions written and read, and written over the link. */
struct cuda_sets_changes {
    struct cuda_sets sets;
    uint32_t *work, *out, *total;
    uint64_t room;
    uint32_t first, n;
};
int cuda_sets_changes(const struct cuda_sets_changes *changes, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
