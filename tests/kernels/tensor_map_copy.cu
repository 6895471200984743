// Copies one box of a tensor through shared memory, as the copy engine lays it out.
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

extern "C" __global__ void copy_box(const __grid_constant__ TensorMap map, unsigned int* out, int x, int y, int bytes) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ unsigned long long barrier;
    unsigned int at = (unsigned int)__cvta_generic_to_shared(&barrier);
    unsigned int target = (unsigned int)__cvta_generic_to_shared(shared);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                target),
            "l"(&map), "r"(x), "r"(y), "r"(at)
            : "memory");
    }
    __syncthreads();
    asm volatile(
        "{\n .reg .pred done;\nagain:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n @!done bra again;\n}" ::"r"(at)
        : "memory");
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = ((unsigned int*)shared)[i];
}
