/* specontext-eval as a function, so that tests can run it. */
#ifndef EVAL_EVAL_H
#define EVAL_EVAL_H

/* Returns the exit code: 0 done, 1 failure, 2 usage, 130 interrupted. */
int eval_main(int argc, char **argv);

#endif
