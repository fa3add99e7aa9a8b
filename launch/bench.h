/* `specontext bench`: prefill and decode, tokens a second, through the daemons that `run` uses. */
#ifndef LAUNCH_BENCH_H
#define LAUNCH_BENCH_H

/* The sub-command; argv[0] is "bench". Returns the exit code: 0 done, 1 failure, 2 usage, 130 interrupted. */
int bench_main(int argc, char **argv);

#endif
