/* `specontext status`: what running daemons say of themselves. */
#ifndef LAUNCH_STATUS_H
#define LAUNCH_STATUS_H

/* The sub-command; argv[0] is "status". Returns the exit code: 0 all daemons answered, 1 not, 2 usage. */
int status_main(int argc, char **argv);

#endif
