/* The program specontext-retriever. All of it is in the archive; see daemon.h. */
#include "retriever/daemon.h"

int main(int argc, char **argv)
{
    return retriever_main(argc, argv);
}
