/* `specontext eval`: hands over to specontext-eval, which computes in its own process. */
#ifndef LAUNCH_EVAL_H
#define LAUNCH_EVAL_H

/* The sub-command; argv[0] is "eval". Returns only when the program could not be started: 1. */
int eval_command_main(int argc, char **argv);

#endif
