// An NVML with one GPU. Its values are numbers in the file that FAKE_NVML names, which each call reads: utilization in percent, bytes of
// memory, milliwatts, degrees, reasons for lower clocks, KiB sent and received over NVLink. -1: the GPU does not have the value.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { UTILIZATION, MEMORY, POWER, TEMPERATURE, REASONS, SENT, RECEIVED, VALUES };

typedef struct { unsigned field, scope; int64_t time, latency; unsigned type, result; uint64_t value; } field_value;

static int64_t value(int index) {
    int64_t found = -1;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    for (int i = 0; file && i <= index; i++)
        if (fscanf(file, "%ld", &found) != 1) found = -1;
    if (file) fclose(file);
    return found;
}

#define RETURN(index, statement) { int64_t found = value(index); if (found < 0) return NOT_SUPPORTED; statement; return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { return getenv("FAKE_NVML") ? SUCCESS : NOT_FOUND; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : "Not Found"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return id[0] == '0' ? SUCCESS : NOT_FOUND; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = 5; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) RETURN(UTILIZATION, rates[0] = rates[1] = found)
int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) RETURN(MEMORY, memory[2] = found)
int nvmlDeviceGetPowerUsage(void *device, unsigned *power) RETURN(POWER, *power = found)
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *temperature) RETURN(TEMPERATURE, *temperature = found)
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, uint64_t *reasons) RETURN(REASONS, *reasons = found)
int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
    for (int i = 0; i < count; i++) {
        int64_t found = value(values[i].field == 138 ? SENT : values[i].field == 139 ? RECEIVED : VALUES);
        values[i].result = found < 0 || values[i].scope != UINT32_MAX ? NOT_SUPPORTED : SUCCESS;
        values[i].value = found;
    }
    return SUCCESS;
}
