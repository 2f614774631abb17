#include "deploy/ctl/sampling.h"

void td_sampling_fill(struct td_sampling_options *o, Tandem__V1__Sampling *sampling, Tandem__V1__Stop *stop)
{
    *sampling = (Tandem__V1__Sampling)TANDEM__V1__SAMPLING__INIT;
    *stop = (Tandem__V1__Stop)TANDEM__V1__STOP__INIT;
    if (o->has_temperature) {
        sampling->temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
        sampling->temperature = o->temperature;
    }
    if (o->has_top_p) {
        sampling->top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P;
        sampling->top_p = o->top_p;
    }
    if (o->has_seed) {
        sampling->seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
        sampling->seed = o->seed;
    }
    sampling->top_k = o->top_k;
    sampling->min_p = o->min_p;
    stop->max_tokens = o->max_tokens;
    stop->min_tokens = o->min_tokens;
    stop->ignore_eos = o->ignore_eos;
    stop->token_ids = o->stop_ids.ids;
    stop->n_token_ids = o->stop_ids.n;
}
