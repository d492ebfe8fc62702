// The portable vocabulary for mx.fast.cuda_kernel. MLX puts it after cuda_fp16.h, cuda_bf16.h and
// cooperative_groups.h, and before `namespace mlx::core::cu {`, which holds the kernel.
typedef unsigned int uint;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

#define TS_FN __device__ __forceinline__
#define TS_THREAD
#define TS_UNROLL _Pragma("unroll")
#define TS_SHARED(T, name, n) __shared__ __align__(16) T name[n]

TS_FN uint3 ts_u3(uint x, uint y, uint z) { uint3 r; r.x = x; r.y = y; r.z = z; return r; }
TS_FN uint ts_linear_tid() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
#define thread_position_in_grid                                                       \
  (ts_u3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
         blockIdx.z * blockDim.z + threadIdx.z))
#define thread_position_in_threadgroup (threadIdx)
#define threadgroup_position_in_grid (blockIdx)
#define threads_per_threadgroup (blockDim)
#define threadgroups_per_grid (gridDim)
#define threads_per_grid \
  (ts_u3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z))
#define thread_index_in_threadgroup (ts_linear_tid())
#define thread_index_in_simdgroup (ts_linear_tid() & 31u)
#define simdgroup_index_in_threadgroup (ts_linear_tid() >> 5)
#define simdgroups_per_threadgroup ((blockDim.x * blockDim.y * blockDim.z) >> 5)

// Where a body has its weights at hand and goes on to what other launches computed.
#define ts_await() ((void)0)
#define ts_barrier() __syncthreads()
#define ts_barrier_device() __syncthreads()
#define ts_simd_barrier() __syncwarp()

// The same tree as Apple's lowering of simd_sum: butterfly over 1, 2, 4, 8, 16.
template <typename T> TS_FN T ts_simd_sum(T v) {
  TS_UNROLL for (int m = 1; m < 32; m <<= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  return v;
}
template <typename T> TS_FN T ts_simd_max(T v) {
  TS_UNROLL for (int m = 1; m < 32; m <<= 1) {
    T o = __shfl_xor_sync(0xffffffffu, v, m);
    v = o > v ? o : v;
  }
  return v;
}
template <typename T> TS_FN T ts_simd_min(T v) {
  TS_UNROLL for (int m = 1; m < 32; m <<= 1) {
    T o = __shfl_xor_sync(0xffffffffu, v, m);
    v = o < v ? o : v;
  }
  return v;
}
TS_FN uint ts_simd_max(uint v) { return __reduce_max_sync(0xffffffffu, v); }
TS_FN int ts_simd_max(int v) { return __reduce_max_sync(0xffffffffu, v); }
TS_FN int ts_simd_min(int v) { return __reduce_min_sync(0xffffffffu, v); }
template <typename T> TS_FN T ts_shuffle(T v, int lane) {
  return __shfl_sync(0xffffffffu, v, lane);
}
template <typename T> TS_FN T ts_shuffle_xor(T v, int m) {
  return __shfl_xor_sync(0xffffffffu, v, m);
}
template <typename T> TS_FN T ts_shuffle_down(T v, int d) {
  return __shfl_down_sync(0xffffffffu, v, d);
}

TS_FN float ts_exp(float x) { return expf(x); }
TS_FN float ts_fast_exp(float x) { return __expf(x); }
TS_FN float ts_log(float x) { return logf(x); }
TS_FN float ts_sin(float x) { return sinf(x); }
TS_FN float ts_cos(float x) { return cosf(x); }
TS_FN float ts_tanh(float x) { return tanhf(x); }
TS_FN float ts_sqrt(float x) { return sqrtf(x); }
TS_FN float ts_rsqrt(float x) { return rsqrtf(x); }
TS_FN float ts_fma(float a, float b, float c) { return fmaf(a, b, c); }
TS_FN float ts_abs(float x) { return fabsf(x); }
TS_FN float ts_min(float a, float b) { return b < a ? b : a; }
TS_FN int ts_min(int a, int b) { return b < a ? b : a; }
TS_FN uint ts_min(uint a, uint b) { return b < a ? b : a; }
TS_FN float ts_max(float a, float b) { return b > a ? b : a; }
TS_FN int ts_max(int a, int b) { return b > a ? b : a; }
TS_FN uint ts_max(uint a, uint b) { return b > a ? b : a; }
TS_FN float ts_as_float(uint u) { return __uint_as_float(u); }
TS_FN uint ts_as_uint(float f) { return __float_as_uint(f); }

// (a & mask) | bits as one instruction: the compiler makes two of it.
TS_FN uint ts_and_or(uint a, uint mask, uint bits) {
  uint r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

// 8- and 16-byte accesses; pointers must be aligned to them.
TS_FN uint2 ts_load_u32x2(const uint* p) { return *reinterpret_cast<const uint2*>(p); }
TS_FN uint4 ts_load_u32x4(const uint* p) { return *reinterpret_cast<const uint4*>(p); }
TS_FN float4 ts_load_f32x4(const float* p) { return *reinterpret_cast<const float4*>(p); }
TS_FN void ts_store_f32x4(float* p, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
}
// A read of data that is used once: past the first cache.
TS_FN uint4 ts_stream_u32x4(const uint* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
TS_FN uint2 ts_stream_u32x2(const uint* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
// Eight values as float.
TS_FN void ts_load8(const float* p, float* v) {
  const float4 a = ts_load_f32x4(p), b = ts_load_f32x4(p + 4);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
TS_FN void ts_load8(const __nv_bfloat16* p, float* v) {
  const uint4 u = *reinterpret_cast<const uint4*>(p);
  const uint w[4] = {u.x, u.y, u.z, u.w};
  TS_UNROLL for (int i = 0; i < 4; i++) {
    v[2 * i] = __uint_as_float(w[i] << 16);
    v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
}
TS_FN void ts_load8(const __half* p, float* v) {
  const uint4 u = *reinterpret_cast<const uint4*>(p);
  const uint w[4] = {u.x, u.y, u.z, u.w};
  TS_UNROLL for (int i = 0; i < 4; i++) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
}
// Eight stored scales: bytes are powers of two with bias 127.
TS_FN void ts_load8(const uint8_t* p, float* v) {
  const uint2 u = *reinterpret_cast<const uint2*>(p);
  TS_UNROLL for (int i = 0; i < 8; i++) {
    const uint e = ((i < 4 ? u.x : u.y) >> (8 * (i % 4))) & 255u;
    v[i] = __uint_as_float(e == 0u ? 0x00400000u : e << 23);
  }
}
// A pointer for writing into an input that the kernel declares as updated in place.
template <typename T> TS_FN T* ts_writable(const T* p) { return const_cast<T*>(p); }
template <typename T> TS_FN const T* ts_readable(T* p) { return p; }

// D += A B on the matrix unit: A [16, 16] and B [16, 8] of T, D [16, 8] float, all in registers.
// Lane 4 g + t holds, as pairs of neighbouring k: a = rows g, g + 8 at k 2t, then at k 2t + 8;
// b = column g at k 2t, then 2t + 8; d = row g at columns 2t, 2t + 1, then row g + 8.
template <typename T> struct ts_mma_of;
template <> struct ts_mma_of<__nv_bfloat16> {
  static TS_FN void run(float* d, const uint* a, const uint* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
template <> struct ts_mma_of<__half> {
  static TS_FN void run(float* d, const uint* a, const uint* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
#define ts_mma(T, d, a, b) ts_mma_of<T>::run(d, a, b)

// The same for 8 rows of A: a = row g at k 2t, then at k 2t + 8; d = row g at columns 2t, 2t + 1.
TS_FN void ts_mma_top_run(float* d, const uint* a, const uint* b) {
  float unused0, unused1;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%10,%11};"
      : "+f"(d[0]), "+f"(d[1]), "=f"(unused0), "=f"(unused1)
      : "r"(a[0]), "r"(0u), "r"(a[1]), "r"(0u), "r"(b[0]), "r"(b[1]), "f"(0.0f), "f"(0.0f));
}
#define ts_mma_top(d, a, b) ts_mma_top_run(d, a, b)

// Two halves in a word, side by side.
TS_FN uint ts_h2_bits(__half2 v) { return *reinterpret_cast<const uint*>(&v); }
TS_FN __half2 ts_h2_of(uint w) { return *reinterpret_cast<const __half2*>(&w); }
TS_FN uint ts_h2_add(uint a, uint b) { return ts_h2_bits(__hadd2(ts_h2_of(a), ts_h2_of(b))); }
TS_FN uint ts_h2_mul(uint a, uint b) { return ts_h2_bits(__hmul2(ts_h2_of(a), ts_h2_of(b))); }
TS_FN uint ts_h2_fma(uint a, uint b, uint c) {
  return ts_h2_bits(__hfma2(ts_h2_of(a), ts_h2_of(b), ts_h2_of(c)));
}

// Two floats rounded to T, the first in the low half.
template <typename T> TS_FN uint ts_pair(float x, float y);
template <> TS_FN uint ts_pair<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint*>(&v);
}
template <> TS_FN uint ts_pair<__half>(float x, float y) {
  const __half2 v = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint*>(&v);
}
template <typename T> TS_FN float ts_low(uint w);
template <typename T> TS_FN float ts_high(uint w);
template <> TS_FN float ts_low<__nv_bfloat16>(uint w) { return __uint_as_float(w << 16); }
template <> TS_FN float ts_high<__nv_bfloat16>(uint w) { return __uint_as_float(w & 0xffff0000u); }
template <> TS_FN float ts_low<__half>(uint w) {
  return __low2float(*reinterpret_cast<const __half2*>(&w));
}
template <> TS_FN float ts_high<__half>(uint w) {
  return __high2float(*reinterpret_cast<const __half2*>(&w));
}
TS_FN void ts_store_u32x4(uint* p, uint a, uint b, uint c, uint d) {
  *reinterpret_cast<uint4*>(p) = make_uint4(a, b, c, d);
}

// --- launches as phases of one (chain.py) ---
#define TS_POOL(n)                                      \
  __shared__ __align__(16) unsigned char ts_pool[n];    \
  constexpr uint ts_pool_size = n;                      \
  __shared__ int ts_ticket_s[2]
#define TS_PHASE(p) uint ts_used = 0u
#define TS_CARVED(T, name, n) T* name = ts_carve<T>(ts_pool, ts_used, ts_pool_size, uint(n))
template <typename T>
TS_FN T* ts_carve(unsigned char* pool, uint& used, uint size, uint n) {
  T* at = reinterpret_cast<T*>(pool + used);
  used += (n * uint(sizeof(T)) + 15u) / 16u * 16u;
  if (used > size) __trap();  // known when compiled
  return at;
}
// The first `threads` threads.
#define ts_barrier_of(threads) asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory")
TS_FN int ts_take(int* count) { return atomicAdd(count, 1); }
// One thread, after a barrier: what the threadgroup wrote is there for who waits for the count.
TS_FN void ts_signal(int* count, int n) {
  __threadfence();
  atomicAdd(count, n);
}
// A simdgroup, until `need` have signalled the end of their part of `phase`.
TS_FN void ts_wait_for(const int* count, int need, int phase) {
  if ((ts_linear_tid() & 31u) == 0u) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    } while (now < need);
  }
  __syncwarp();
}
