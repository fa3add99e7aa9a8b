/* The option that getopt_long has just refused, as the user wrote it. */
#ifndef LAUNCH_OPTION_WORD_H
#define LAUNCH_OPTION_WORD_H

#define OPTION_WORD_BYTES 96

/* After '?' or ':', with options strings that begin with ':' (getopt then prints nothing itself): "unknown
 * option --bogus" or "an argument is missing after -m". */
void option_word(char *const *argv, int answer, char ret_text[OPTION_WORD_BYTES]);

#endif
