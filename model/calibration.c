/* Maps of mass; see calibration.h. No state; any thread. */
#include "model/calibration.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A decimal number at *text, which is moved behind it. */
static int read_number(const char **text, float *ret)
{
    char *end;
    if (!strchr("0123456789.", **text) || !**text)
        return -EINVAL;
    size_t length = strspn(*text, "0123456789.eE+-");
    *ret = strtof(*text, &end);
    if (end != *text + length)
        return -EINVAL;
    *text = end;
    return 0;
}

int calibration_check(const struct calibration *c, struct err *err)
{
    if (c->count == 0)
        return 0;
    if (c->count < 2 || c->count > CALIBRATION_POINTS_MAX)
        return err_set(err, -EBADMSG, "found %u pairs, expected 2 to %u", c->count, CALIBRATION_POINTS_MAX);
    for (uint32_t i = 0; i < c->count; i++) {
        double own = (double)c->own[i], measured = (double)c->measured[i];
        if (!(own >= 0 && own <= 1 && measured >= 0 && measured <= 1))
            return err_set(err, -EBADMSG, "found %g:%g, expected shares from 0 to 1", own, measured);
        if (i && !(c->own[i] > c->own[i - 1] && c->measured[i] >= c->measured[i - 1]))
            return err_set(err, -EBADMSG, "found %g:%g behind %g:%g, expected pairs that ascend", own,
                           measured, (double)c->own[i - 1], (double)c->measured[i - 1]);
    }
    uint32_t last = c->count - 1;
    if (c->own[0] != 0 || c->own[last] != 1 || c->measured[last] != 1)
        return err_set(err, -EBADMSG, "found %g:%g to %g:%g, expected a first own of 0 and a last pair 1:1",
                       (double)c->own[0], (double)c->measured[0], (double)c->own[last],
                       (double)c->measured[last]);
    return 0;
}

int calibration_parse(const char *text, struct calibration *ret, struct err *err)
{
    const char *at = text;
    *ret = (struct calibration){0};
    do {
        if (ret->count == CALIBRATION_POINTS_MAX)
            return err_set(err, -EBADMSG, "found more than %u pairs, expected at most that many",
                           CALIBRATION_POINTS_MAX);
        at += ret->count != 0;
        if (read_number(&at, &ret->own[ret->count]) < 0 || *at++ != ':' ||
            read_number(&at, &ret->measured[ret->count]) < 0)
            return err_set(err, -EBADMSG, "found \"%.60s\", expected pairs own:measured with commas between",
                           text);
        ret->count++;
    } while (*at == ',');
    if (*at)
        return err_set(err, -EBADMSG, "found \"%.60s\", expected pairs own:measured with commas between",
                       text);
    return calibration_check(ret, err);
}

void calibration_text(const struct calibration *c, char ret_text[CALIBRATION_TEXT_BYTES])
{
    size_t at = 0;
    *ret_text = 0;
    for (uint32_t i = 0; i < c->count && at < CALIBRATION_TEXT_BYTES; i++)
        at += (size_t)snprintf(ret_text + at, CALIBRATION_TEXT_BYTES - at, "%s%.9g:%.9g", i ? "," : "",
                               (double)c->own[i], (double)c->measured[i]);
}

double calibration_at(const struct calibration *c, double own)
{
    if (c->count == 0 || own != own)
        return own;
    if (own <= 0)
        return (double)c->measured[0];
    if (own >= 1)
        return 1;
    uint32_t i = 1;
    while (own > (double)c->own[i])
        i++;
    double x0 = (double)c->own[i - 1], x1 = (double)c->own[i];
    double y0 = (double)c->measured[i - 1], y1 = (double)c->measured[i];
    return y0 + (y1 - y0) * ((own - x0) / (x1 - x0));
}
