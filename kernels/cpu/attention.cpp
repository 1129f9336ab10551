// Attention over paged keys and values on a CPU (attention.h) as one call, and the store of keys and values.

#include "amx_attention.h"
#include "attention.h"

#include <omp.h>

namespace {

// Waking a sleeping thread takes some 50 us; with fewer multiply-adds than this, one thread is faster.
constexpr int64_t WORTH_A_THREAD = 1 << 20;

template <class Worker>
void run(const paged::Arguments& a, int num_threads) {
    const paged::Plan plan = paged::make_plan<Worker>(a, num_threads);
    std::unique_ptr<float[]> partials(new float[plan.partial_floats]);
    std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[plan.num_counters]());
    std::atomic<int64_t> next{0};
    auto work = [&] {
        Worker worker(a, plan, partials.get(), done.get());
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int64_t(plan.items.size());)
            worker.run(plan.items[i]);
    };
    if (num_threads == 1 || plan.items.size() == 1 || plan.cost < WORTH_A_THREAD) {
        work();
    } else {
#pragma omp parallel num_threads(num_threads)
        work();
    }
}

}  // namespace

extern "C" {

void crossdock_paged_attention(const paged::Arguments* a, int is_bf16, int num_threads) {
    if (is_bf16)
        run<paged::Worker<bf16, paged::ForBf16>>(*a, num_threads);
    else
        run<paged::Worker<float, paged::Floats>>(*a, num_threads);
}

// Returns whether `crossdock_amx_attention` runs: by this compiler, on this CPU, under this kernel.
int crossdock_has_amx() {
#if defined(WITH_AMX)
    return amx::may_use_tiles();
#else
    return 0;
#endif
}

// The same in bf16, for pages and heads of a multiple of amx::RUN keys and amx::PAIR elements, keys as wide as values.
void crossdock_amx_attention([[maybe_unused]] const paged::Arguments* a, [[maybe_unused]] int num_threads) {
#if defined(WITH_AMX)
    run<paged::TileWorker>(*a, num_threads);
#endif
}

// Stores the rows x[T, H, D] of k or v to their slots; a negative slot stores nothing. Strides and D in bytes.
void crossdock_store(const char* x, int64_t x_token, int64_t x_head, char* pages, int64_t page_stride, int64_t head_stride,
                     int64_t page_size, const int64_t* slots, int64_t T, int64_t H, int64_t D) {
    for (int64_t t = 0; t < T; ++t) {
        if (slots[t] < 0) continue;
        char* to = pages + slots[t] / page_size * page_stride + slots[t] % page_size * D;
        for (int64_t h = 0; h < H; ++h) std::memcpy(to + h * head_stride, x + t * x_token + h * x_head, D);
    }
}
}
