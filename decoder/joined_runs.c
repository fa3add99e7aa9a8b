/* One wait for all rows, or one a run; see joined_runs.h. */
#include "decoder/joined_runs.h"

void joined_runs_init(struct joined_runs *j)
{
    *j = (struct joined_runs){.joined = 1, .wanted = 1};
}

void joined_runs_begin(struct joined_runs *j)
{
    j->launched_ns = j->rows_ns = 0;
}

void joined_runs_launched(struct joined_runs *j, int64_t now)
{
    j->launched_ns = now;
}

void joined_runs_ready(struct joined_runs *j, int64_t now)
{
    if (j->rows_ns == 0)
        j->rows_ns = now;
}

void joined_runs_end(struct joined_runs *j, uint32_t resident, uint32_t layers, int64_t now)
{
    if (j->launched_ns == 0 || resident == 0 || resident >= layers)
        return;
    /* About when the first offloaded layer was reached; a quarter is left for steps whose rows come later. */
    int64_t reached = (now - j->launched_ns) / layers * resident;
    int soon = j->rows_ns > 0 && j->rows_ns - j->launched_ns < reached / 4 * 3;
    j->launched_ns = 0; /* a step counts once */
    j->against = soon == j->wanted ? 0 : j->against + 1;
    if (j->against < (j->wanted ? JOINED_RUNS_LATE : JOINED_RUNS_SOON))
        return;
    j->wanted = soon;
    j->against = 0;
}
