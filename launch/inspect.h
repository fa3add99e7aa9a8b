/* `specontext inspect`: what a model is, and whether it fits. */
#ifndef LAUNCH_INSPECT_H
#define LAUNCH_INSPECT_H

/* The sub-command; argv[0] is "inspect". Returns the exit code: 0, 1 failure (with --memory also: does not
 * fit), 2 usage. */
int inspect_main(int argc, char **argv);

#endif
