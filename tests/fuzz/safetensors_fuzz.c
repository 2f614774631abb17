/* A safetensors file of any bytes: header checks only, as before its data is touched. */
#include "common/model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td_err err;
    (void)td_safetensors_check(data, size, &err);
    return 0;
}
