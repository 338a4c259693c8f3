/* A stand-in for the CUDA driver, libcuda.so.1, that records what Triton's launch function hands it and runs nothing.
 *
 * A tensor map is the arguments that it would be made of. `fake_sizes` says how many parameters the next kernel has and how many bytes each;
 * `fake_taken` gives the last launch, grid, block, shared memory, number of attributes, stream, function and
 * parameters, and forgets the sizes. */
#include "cuda.h"
#include <string.h>

static int count, sizes[256];
static size_t used;
static unsigned char record[1 << 16];

void fake_sizes(int n, const int *bytes) {
    count = n;
    memcpy(sizes, bytes, n * sizeof(int));
    used = 0;
}

size_t fake_taken(unsigned char *out) {
    memcpy(out, record, used);
    count = 0;
    return used;
}

static void put(const void *from, size_t bytes) {
    memcpy(record + used, from, bytes);
    used += bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    unsigned int about[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, c->numAttrs};
    used = 0;
    put(about, sizeof about);
    put(&c->hStream, sizeof c->hStream);
    put(&function, sizeof function);
    for (int i = 0; i < count; i++)
        put(params[i], sizes[i]);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    unsigned char *at = (unsigned char *)map;
    unsigned char kinds[] = {type, rank, interleave, swizzle, promotion, fill};
    memset(at, 0, 128);
    memcpy(at, &address, 8);
    memcpy(at + 8, dims, 8 * rank);
    memcpy(at + 48, strides, 8 * (rank - 1));
    memcpy(at + 80, box, 4 * rank);
    memcpy(at + 100, steps, 4 * rank);
    memcpy(at + 120, kinds, sizeof kinds);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "an error of the stand-in";
    return CUDA_SUCCESS;
}

static CUresult number(int *out, int value) {
    *out = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) { *out = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *out) { return number(out, 0); }
CUresult cuCtxGetLimit(size_t *out, CUlimit limit) { *out = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int index) { return number(out, 0); }
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) { return number(out, 227 * 1024); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { *out = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *out) { return number(out, 13020); }
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction function) { return number(out, 1024); }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) { *out = (CUfunction)0x1234567890; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *out, const void *image) { *out = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
    memcpy(out, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) { *out = 0; return CUDA_SUCCESS; }
