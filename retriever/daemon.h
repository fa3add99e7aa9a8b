/* specontext-retriever as a function, so that tests can run it in a process of their own. */
#ifndef RETRIEVER_DAEMON_H
#define RETRIEVER_DAEMON_H

/* Runs until it is asked to end. Returns the exit code: 0 asked for, 1 failure, 2 usage. */
int retriever_main(int argc, char **argv);

#endif
