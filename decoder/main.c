/* specontext-decoder: owns the language model's weights and activations, batches and samples. Allocates no KV
 * memory: it maps what the store hands out. */
#include <stdio.h>
#include <systemd/sd-daemon.h>

#include "base/err.h"
#include "base/log.h"
#include "base/trace.h"
#include "decoder/settings.h"
#include "decoder/serve.h"
#include "model/model.h"

int main(int argc, char **argv)
{
    struct settings options;
    struct err err = {0};
    int r = settings_parse(argc, argv, &options, &err);
    if (r < 0) {
        fprintf(stderr, "specontext-decoder: %s\n", err.text);
        return 2;
    }
    if (r > 0)
        return 0;
    log_init("decoder", options.daemon.log);
    trace_open("decoder");
    struct model *model = NULL;
    if (model_open(options.model, &model, &err) < 0) {
        log_error("%s", err.text);
        sd_notifyf(0, "STOPPING=1\nSTATUS=%s", err.text);
        return 1;
    }
    log_info("start: version %s, model %s, %llu MiB of weights, %d threads", SPECONTEXT_VERSION,
             model_name(model), (unsigned long long)(model_weight_bytes(model) >> 20), options.threads);
    int code = serve_run(&options, model);
    model_free(&model);
    return code;
}
