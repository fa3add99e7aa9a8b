/* The double of a GPU for tests and for the daemons that they start: tests/fakegpu/fakegpu.h. */
#ifndef TESTS_LIB_FAKEGPU_H
#define TESTS_LIB_FAKEGPU_H

/* Puts the double's library into the environment of this process and of those that it starts: its path
 * follows from that of the test's program. `card` names the cards whose memory all these processes share
 * (no dots); NULL: each has cards of its own. Failures abort. Where SPECONTEXT_TEST_GPU_LIBRARY names a
 * library, that one is used: tests that need nothing of the double then run on a real GPU. */
void fakegpu_use(const char *card);

/* Skips the running test, by name, where a real library is used: for tests that set up the double's cards. */
void fakegpu_need_double(void);

#endif
