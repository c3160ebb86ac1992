// mamba-ssm's CUDA kernel of the selective scan (Mamba-1) behind a C call, as its own launcher picks it above 1,024
// tokens. With S a folder where its source package was unpacked, T torch's headers, and an empty c10/cuda/CUDAException.h
// (which defines C10_CUDA_CHECK(x) as x) in STUB, where torch was built without CUDA:
//
//   nvcc -O3 -std=c++20 --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda -arch=sm_90 -shared
//     -Xcompiler -fPIC -cudart static -ISTUB -IS/csrc/selective_scan -IT -I/usr/local/cuda/include/cccl
//     selective_scan.cu -o selective_scan.so
#include <cuda_runtime.h>
#include <cstring>
#include <cmath>
#include "selective_scan_fwd_kernel.cuh"

extern "C" int selective_scan(int dim, int seqlen, int dstate, int n_chunks, void *u, void *delta, void *A, void *B,
                              void *C, void *D, void *bias, void *z, void *out, void *out_z, void *x, void *stream) {
    SSMParamsBase p;
    memset(&p, 0, sizeof(p));
    p.batch = 1; p.dim = dim; p.seqlen = seqlen; p.dstate = dstate; p.n_groups = 1; p.n_chunks = n_chunks;
    p.dim_ngroups_ratio = dim; p.is_variable_B = p.is_variable_C = true; p.delta_softplus = true;
    p.A_d_stride = dstate; p.A_dstate_stride = 1;
    p.B_dstate_stride = p.C_dstate_stride = seqlen;
    p.B_batch_stride = p.C_batch_stride = p.B_group_stride = p.C_group_stride = (uint64_t)dstate * seqlen;
    p.u_d_stride = p.delta_d_stride = p.z_d_stride = p.out_d_stride = p.out_z_d_stride = seqlen;
    p.A_ptr = A; p.B_ptr = B; p.C_ptr = C; p.D_ptr = D; p.u_ptr = u; p.delta_ptr = delta; p.delta_bias_ptr = bias;
    p.out_ptr = out; p.x_ptr = x; p.z_ptr = z; p.out_z_ptr = out_z;
    if (seqlen <= 1024 || seqlen % 2048) return -1;
    using Traits = Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true, true, true, at::BFloat16, float>;
    constexpr int bytes = Traits::kSmemSize + MAX_DSTATE * sizeof(typename Traits::scan_t);
    selective_scan_fwd_kernel<Traits><<<dim3(1, dim), 128, bytes, (cudaStream_t)stream>>>(p);
    return (int)cudaGetLastError();
}
