// The operator AddOne of the tests, y = x + 1 for f32, as a library of custom operators for ONNX Runtime.
//
// Its wheel has no headers. What is used of its C interface, whose table of functions only ever grows at its end, is
// declared here: places in `OrtApi`, and the beginning of `OrtCustomOp` as version 8 has it.
#include <stddef.h>
#include <stdint.h>

enum {
    CREATE_CUSTOM_OP_DOMAIN = 26,
    CUSTOM_OP_DOMAIN_ADD = 27,
    ADD_CUSTOM_OP_DOMAIN = 28,
    GET_TENSOR_MUTABLE_DATA = 51,
    GET_DIMENSIONS_COUNT = 61,
    GET_DIMENSIONS = 62,
    GET_TENSOR_TYPE_AND_SHAPE = 65,
    KERNEL_CONTEXT_GET_INPUT = 90,
    KERNEL_CONTEXT_GET_OUTPUT = 91,
    RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99,
};
enum { FLOAT = 1, REQUIRED = 0, API_VERSION = 8, MAX_RANK = 8 };

typedef void (*Function)(void);
typedef struct Status Status;
typedef struct {
    const Function* (*get_api)(uint32_t version);
    const char* (*get_version_string)(void);
} ApiBase;
typedef struct CustomOp CustomOp;
struct CustomOp {
    uint32_t version;
    void* (*create_kernel)(const CustomOp*, const Function* api, const void* info);
    const char* (*get_name)(const CustomOp*);
    const char* (*get_execution_provider_type)(const CustomOp*);
    int (*get_input_type)(const CustomOp*, size_t index);
    size_t (*get_input_type_count)(const CustomOp*);
    int (*get_output_type)(const CustomOp*, size_t index);
    size_t (*get_output_type_count)(const CustomOp*);
    void (*kernel_compute)(void* kernel, void* context);
    void (*kernel_destroy)(void* kernel);
    int (*get_input_characteristic)(const CustomOp*, size_t index);
    int (*get_output_characteristic)(const CustomOp*, size_t index);
};

static const Function* api;

static void* create_kernel(const CustomOp* op, const Function* given, const void* info) {
    (void)op, (void)info;
    return (void*)given;
}

static const char* get_name(const CustomOp* op) { return (void)op, "AddOne"; }
static const char* get_provider(const CustomOp* op) { return (void)op, NULL; }
static int get_type(const CustomOp* op, size_t index) { return (void)op, (void)index, FLOAT; }
static size_t get_count(const CustomOp* op) { return (void)op, 1; }
static int get_characteristic(const CustomOp* op, size_t index) { return (void)op, (void)index, REQUIRED; }
static void destroy(void* kernel) { (void)kernel; }

static void compute(void* kernel, void* context) {
    const void* x = NULL;
    void *y = NULL, *shape = NULL;
    float *from = NULL, *to = NULL;
    size_t rank = 0, size = 1;
    int64_t dims[MAX_RANK];
    (void)kernel;
    ((Status * (*)(const void*, size_t, const void**)) api[KERNEL_CONTEXT_GET_INPUT])(context, 0, &x);
    ((Status * (*)(const void*, void**)) api[GET_TENSOR_TYPE_AND_SHAPE])(x, &shape);
    ((Status * (*)(const void*, size_t*)) api[GET_DIMENSIONS_COUNT])(shape, &rank);
    ((Status * (*)(const void*, int64_t*, size_t)) api[GET_DIMENSIONS])(shape, dims, rank);
    ((void (*)(void*))api[RELEASE_TENSOR_TYPE_AND_SHAPE_INFO])(shape);
    ((Status * (*)(void*, size_t, const int64_t*, size_t, void**)) api[KERNEL_CONTEXT_GET_OUTPUT])(
        context, 0, dims, rank, &y);
    ((Status * (*)(const void*, float**)) api[GET_TENSOR_MUTABLE_DATA])(x, &from);
    ((Status * (*)(void*, float**)) api[GET_TENSOR_MUTABLE_DATA])(y, &to);
    for (size_t axis = 0; axis < rank; ++axis) {
        size *= (size_t)dims[axis];
    }
    for (size_t index = 0; index < size; ++index) {
        to[index] = from[index] + 1;
    }
}

static const CustomOp add_one = {
    API_VERSION, create_kernel, get_name, get_provider, get_type,           get_count,
    get_type,    get_count,     compute,  destroy,      get_characteristic, get_characteristic,
};

Status* RegisterCustomOps(void* options, const ApiBase* base) {
    void* domain = NULL;  // lives as long as the sessions: as long as the process
    Status* status = NULL;
    api = base->get_api(API_VERSION);
    status = ((Status * (*)(const char*, void**)) api[CREATE_CUSTOM_OP_DOMAIN])("headrace", &domain);
    if (status == NULL) {
        status = ((Status * (*)(void*, const CustomOp*)) api[CUSTOM_OP_DOMAIN_ADD])(domain, &add_one);
    }
    if (status == NULL) {
        status = ((Status * (*)(void*, void*)) api[ADD_CUSTOM_OP_DOMAIN])(options, domain);
    }
    return status;
}
