/* `specontext tokenize` and `specontext detokenize`: a model's tokenizer by hand. */
#ifndef LAUNCH_TOKENIZE_H
#define LAUNCH_TOKENIZE_H

/* The sub-commands; argv[0] is their name. Return the exit code: 0, 1 failure, 2 usage. */
int tokenize_main(int argc, char **argv);
int detokenize_main(int argc, char **argv);

#endif
