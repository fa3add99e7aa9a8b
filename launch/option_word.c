/* See option_word.h. State: getopt's own. */
#include "launch/option_word.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

void option_word(char *const *argv, int answer, char ret_text[OPTION_WORD_BYTES])
{
    const char *what = answer == ':' ? "an argument is missing after" : "unknown option";
    const char *word = optind > 0 ? argv[optind - 1] : "";
    /* Behind one letter of several optind has not moved: the letter alone is known. */
    if (optopt > 0 && optopt < 128 && strncmp(word, "--", 2) != 0)
        snprintf(ret_text, OPTION_WORD_BYTES, "%s -%c", what, optopt);
    else
        snprintf(ret_text, OPTION_WORD_BYTES, "%s %.60s", what, word);
}
