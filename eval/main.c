/* The program specontext-eval, which `specontext eval` becomes. All of it is in the archive; see eval.h. */
#include "eval/eval.h"

int main(int argc, char **argv)
{
    return eval_main(argc, argv);
}
