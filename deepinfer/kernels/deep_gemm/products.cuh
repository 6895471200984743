// Matrix products of a warpgroup: d [64 x N] = a [64 x 32] b [N x 32]^T (+ d) on FP8 operands, FP32 sums; `multiply_wide` on
// BF16 operands, 16 columns.  b is in shared
// memory, the summed dimension contiguous and swizzled in 128 bytes; a is there too, or in registers. Accumulator d[4 j + i]
// of a thread belongs to row 16 warp + lane / 4 + 8 (i / 2) and column 8 j + 2 (lane % 4) + i % 2. Four bytes a[0] in
// registers belong to row 16 warp + lane / 4 and columns 4 (lane % 4) + 0..3; a[1] to the row 8 further, a[2] and a[3] to the
// columns 16 further.
#pragma once

#include "../deep_jit/hopper.cuh"

// Operands of the assembly: "%0, %1, ..." and "+f"(d[0]), "+f"(d[1]), ...
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_12 ", %12, %13, %14, %15"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"
#define NAMES_24 NAMES_20 ", %20, %21, %22, %23"
#define NAMES_28 NAMES_24 ", %24, %25, %26, %27"
#define NAMES_32 NAMES_28 ", %28, %29, %30, %31"
#define NAMES_36 NAMES_32 ", %32, %33, %34, %35"
#define NAMES_40 NAMES_36 ", %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)

// What a product writes and does not read, COUNT sums from d[0] on.
#define NEW_4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define NEW_8 NEW_4(0), NEW_4(4)
#define NEW_16 NEW_8, NEW_4(8), NEW_4(12)
#define NEW_24 NEW_16, NEW_4(16), NEW_4(20)
#define NEW_28 NEW_24, NEW_4(24)
#define NEW_32 NEW_28, NEW_4(28)
#define NEW_36 NEW_32, NEW_4(32)
#define NEW_40 NEW_36, NEW_4(36)
#define NEW_48 NEW_40, NEW_4(40), NEW_4(44)
#define NEW_64 NEW_48, NEW_4(48), NEW_4(52), NEW_4(56), NEW_4(60)
#define NEW_80 NEW_64, NEW_4(64), NEW_4(68), NEW_4(72), NEW_4(76)

#define SHARED_PRODUCT(NAME, KIND, FLAGS, WIDTH, COUNT, A, B, ACCUMULATE, ...)                               \
    DEVICE void NAME(float (&d)[COUNT], u64 a, u64 b, int accumulate) {                                     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDTH KIND " {" NAMES_##COUNT "}, " A ", " B      \
                     ", p, 1, 1" FLAGS ";\n}"                                                               \
                     : __VA_ARGS__                                                                          \
                     : "l"(a), "l"(b), "r"(accumulate));                                                    \
    }
#define PRODUCT(...) SHARED_PRODUCT(multiply, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)
#define BF16_PRODUCT(...) SHARED_PRODUCT(multiply_wide, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)
#define REGISTER_PRODUCT(WIDTH, COUNT, A, B, ACCUMULATE, ...)                                           \
    DEVICE void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b, int accumulate) {                 \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES_##COUNT "}, {" A \
                     "}, " B ", p, 1, 1;\n}"                                                            \
                     : __VA_ARGS__                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));            \
    }                                                                                                   \
    /* d need not hold anything before: no registers are kept for it. */                                \
    DEVICE void multiply_new(float (&d)[COUNT], const u32 (&a)[4], u64 b) {                             \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                            \
                     "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES_##COUNT "}, {" A \
                     "}, " B ", p, 1, 1;\n}"                                                            \
                     : NEW_##COUNT                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(0));                     \
    }

PRODUCT(8, 4, "%4", "%5", "%6", SUMS_4(0))
PRODUCT(16, 8, "%8", "%9", "%10", SUMS_8(0))
PRODUCT(24, 12, "%12", "%13", "%14", SUMS_8(0), SUMS_4(8))
PRODUCT(32, 16, "%16", "%17", "%18", SUMS_16(0))
PRODUCT(40, 20, "%20", "%21", "%22", SUMS_16(0), SUMS_4(16))
PRODUCT(48, 24, "%24", "%25", "%26", SUMS_16(0), SUMS_8(16))
PRODUCT(56, 28, "%28", "%29", "%30", SUMS_16(0), SUMS_8(16), SUMS_4(24))
PRODUCT(64, 32, "%32", "%33", "%34", SUMS_32(0))
PRODUCT(80, 40, "%40", "%41", "%42", SUMS_32(0), SUMS_8(32))
PRODUCT(96, 48, "%48", "%49", "%50", SUMS_32(0), SUMS_16(32))
PRODUCT(112, 56, "%56", "%57", "%58", SUMS_32(0), SUMS_16(32), SUMS_8(48))
PRODUCT(128, 64, "%64", "%65", "%66", SUMS_32(0), SUMS_32(32))
PRODUCT(160, 80, "%80", "%81", "%82", SUMS_32(0), SUMS_32(32), SUMS_16(64))
PRODUCT(192, 96, "%96", "%97", "%98", SUMS_32(0), SUMS_32(32), SUMS_32(64))
REGISTER_PRODUCT(16, 8, "%8, %9, %10, %11", "%12", "%13", SUMS_8(0))
REGISTER_PRODUCT(32, 16, "%16, %17, %18, %19", "%20", "%21", SUMS_16(0))
REGISTER_PRODUCT(48, 24, "%24, %25, %26, %27", "%28", "%29", SUMS_16(0), SUMS_8(16))
REGISTER_PRODUCT(56, 28, "%28, %29, %30, %31", "%32", "%33", SUMS_16(0), SUMS_8(16), SUMS_4(24))
REGISTER_PRODUCT(64, 32, "%32, %33, %34, %35", "%36", "%37", SUMS_32(0))
REGISTER_PRODUCT(72, 36, "%36, %37, %38, %39", "%40", "%41", SUMS_32(0), SUMS_4(32))
REGISTER_PRODUCT(80, 40, "%40, %41, %42, %43", "%44", "%45", SUMS_32(0), SUMS_8(32))
REGISTER_PRODUCT(96, 48, "%48, %49, %50, %51", "%52", "%53", SUMS_32(0), SUMS_16(32))
REGISTER_PRODUCT(128, 64, "%64, %65, %66, %67", "%68", "%69", SUMS_32(0), SUMS_32(32))
REGISTER_PRODUCT(160, 80, "%80, %81, %82, %83", "%84", "%85", SUMS_32(0), SUMS_32(32), SUMS_16(64))
BF16_PRODUCT(16, 8, "%8", "%9", "%10", SUMS_8(0))
BF16_PRODUCT(32, 16, "%16", "%17", "%18", SUMS_16(0))
BF16_PRODUCT(64, 32, "%32", "%33", "%34", SUMS_32(0))
BF16_PRODUCT(128, 64, "%64", "%65", "%66", SUMS_32(0), SUMS_32(32))
