/* The CPU backend's table. */
#ifndef TD_KERNELS_DEVICE_CPU_H
#define TD_KERNELS_DEVICE_CPU_H

#include "kernels/device.h"

extern const struct td_backend td_backend_cpu;

#endif
