// The portable vocabulary for mx.fast.metal_kernel. The thread attributes
// (thread_position_in_grid, ...) need no definition: MLX declares each one whose name stands in
// the kernel body.
#ifdef TS_MSL_STUB  // clang cannot give a local variable an address space, Metal can
#define TS_SHARED(T, name, n) static threadgroup T name[n]
#else
#define TS_SHARED(T, name, n) threadgroup T name[n]
#endif
#define TS_FN inline
#define TS_THREAD thread
#define TS_UNROLL _Pragma("clang loop unroll(full)")

#define ts_barrier() threadgroup_barrier(mem_flags::mem_threadgroup)
#define ts_barrier_device() \
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define ts_simd_barrier() simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define ts_simd_sum(v) metal::simd_sum(v)
#define ts_simd_max(v) metal::simd_max(v)
#define ts_simd_min(v) metal::simd_min(v)
#define ts_shuffle(v, l) metal::simd_shuffle((v), ushort(l))
#define ts_shuffle_xor(v, m) metal::simd_shuffle_xor((v), ushort(m))
#define ts_shuffle_down(v, d) metal::simd_shuffle_down((v), ushort(d))

TS_FN float ts_exp(float x) { return metal::precise::exp(x); }
TS_FN float ts_fast_exp(float x) { return metal::fast::exp(x); }
TS_FN float ts_log(float x) { return metal::precise::log(x); }
TS_FN float ts_sin(float x) { return metal::precise::sin(x); }
TS_FN float ts_cos(float x) { return metal::precise::cos(x); }
TS_FN float ts_tanh(float x) { return metal::precise::tanh(x); }
TS_FN float ts_sqrt(float x) { return metal::precise::sqrt(x); }
TS_FN float ts_rsqrt(float x) { return metal::precise::rsqrt(x); }
TS_FN float ts_fma(float a, float b, float c) { return metal::fma(a, b, c); }
TS_FN float ts_abs(float x) { return metal::abs(x); }
TS_FN float ts_min(float a, float b) { return b < a ? b : a; }
TS_FN int ts_min(int a, int b) { return b < a ? b : a; }
TS_FN uint ts_min(uint a, uint b) { return b < a ? b : a; }
TS_FN float ts_max(float a, float b) { return b > a ? b : a; }
TS_FN int ts_max(int a, int b) { return b > a ? b : a; }
TS_FN uint ts_max(uint a, uint b) { return b > a ? b : a; }
TS_FN float ts_as_float(uint u) { return as_type<float>(u); }
TS_FN uint ts_as_uint(float f) { return as_type<uint>(f); }

TS_FN uint ts_and_or(uint a, uint mask, uint bits) { return (a & mask) | bits; }

// 8- and 16-byte accesses; pointers must be aligned to them.
TS_FN uint2 ts_load_u32x2(const device uint* p) { return *(const device uint2*)p; }
TS_FN uint4 ts_load_u32x4(const device uint* p) { return *(const device uint4*)p; }
TS_FN uint4 ts_load_u32x4(const threadgroup uint* p) { return *(const threadgroup uint4*)p; }
TS_FN float4 ts_load_f32x4(const device float* p) { return *(const device float4*)p; }
TS_FN float4 ts_load_f32x4(const threadgroup float* p) { return *(const threadgroup float4*)p; }
TS_FN void ts_store_f32x4(threadgroup float* p, float a, float b, float c, float d) {
  p[0] = a; p[1] = b; p[2] = c; p[3] = d;
}
TS_FN uint4 ts_stream_u32x4(const device uint* p) { return *(const device uint4*)p; }
// Eight values as float.
TS_FN void ts_load8(const device float* p, thread float* v) {
  const float4 a = ts_load_f32x4(p), b = ts_load_f32x4(p + 4);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
TS_FN void ts_load8(const device bfloat16_t* p, thread float* v) {
  const uint4 u = *(const device uint4*)p;
  const uint w[4] = {u.x, u.y, u.z, u.w};
  TS_UNROLL for (int i = 0; i < 4; i++) {
    v[2 * i] = as_type<float>(w[i] << 16);
    v[2 * i + 1] = as_type<float>(w[i] & 0xffff0000u);
  }
}
TS_FN void ts_load8(const device half* p, thread float* v) {
  TS_UNROLL for (int i = 0; i < 8; i++) v[i] = float(p[i]);
}
// A pointer for writing into an input that the kernel declares as updated in place.
template <typename T> TS_FN device T* ts_writable(const device T* p) { return (device T*)p; }
