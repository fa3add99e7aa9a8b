/* `specontext run`: answers prompts with three daemons that it starts, watches and ends. */
#ifndef LAUNCH_RUN_H
#define LAUNCH_RUN_H

/* The sub-command; argv[0] is "run". Returns the exit code: 0 done, 1 failure, 2 usage, 130 interrupted. */
int run_main(int argc, char **argv);

#endif
