/* `specontext plan`: how long contexts may grow before layers have to leave the device. */
#ifndef LAUNCH_PLAN_H
#define LAUNCH_PLAN_H

/* The sub-command; argv[0] is "plan". Returns the exit code: 0, 1 failure, 2 usage. */
int plan_main(int argc, char **argv);

#endif
