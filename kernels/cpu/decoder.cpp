// A stack of Llama-shaped decoder layers over paged KV, of float or bf16, one parallel region per forward pass.
//
// Between layers and operations the threads wait at a spinning barrier of our own. Waking OpenMP's passive threads for
// each operation takes longer than a decode step's arithmetic (45 us a region on the machine this was written on).
// Every row is computed in the same order whatever the other rows are, so results do not depend on the batch.

#include "amx_attention.h"
#include "amx_products.h"
#include "attention.h"
#include "layer_steps.h"
#include "low_rank.h"
#include "rounded.h"

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <vector>

namespace {

inline void relax() {  // tells the core that its thread spins
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Pins each thread of a pass to one core, if all of the machine's cores are ours. Otherwise Linux wakes a thread on the
// core of the thread that woke it, and for milliseconds both share that core while the other core is idle.
class OwnCore {
   public:
    OwnCore(int tid, int nt) : is_master_(tid == 0) {
        if (CPU_COUNT(&allowed()) != nt) return;
        int cpu = 0;
        for (int seen = -1; (seen += CPU_ISSET(cpu, &allowed()) != 0) < tid; ++cpu) {}
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        is_set_ = sched_setaffinity(0, sizeof one, &one) == 0;
    }
    ~OwnCore() {  // unpins the caller's thread: threads that it starts would inherit the one core
        if (is_set_ && is_master_) sched_setaffinity(0, sizeof(cpu_set_t), &allowed());
    }

   private:
    static cpu_set_t& allowed() {
        static cpu_set_t set = [] {
            cpu_set_t all;
            CPU_ZERO(&all);
            sched_getaffinity(0, sizeof all, &all);
            return all;
        }();
        return set;
    }
    bool is_master_, is_set_ = false;
};

// Waiting threads spin for some microseconds, then sleep. A thread that spins on would occupy a core that the awaited
// thread could use at once when another process has taken its core.
struct Barrier {
    std::atomic<int> waiting{0}, phase{0}, sleeping{0};
    int size = 1;

    void wait() {
        if (size == 1) return;
        const int now = phase.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            waiting.store(0, std::memory_order_relaxed);
            phase.store(now + 1);
            if (sleeping.load()) futex(FUTEX_WAKE_PRIVATE, size);
            return;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (phase.load(std::memory_order_acquire) != now) return;
            relax();
        }
        sleeping.fetch_add(1);
        while (phase.load() == now) futex(FUTEX_WAIT_PRIVATE, now);
        sleeping.fetch_sub(1);
    }

   private:
    static constexpr int SPINS = 1000;

    void futex(int operation, int value) {
        syscall(SYS_futex, reinterpret_cast<int*>(&phase), operation, value, nullptr, nullptr, 0);
    }
};

}  // namespace

extern "C" {

struct Layer {
    const void *input_norm, *qkv_bias, *q_norm, *k_norm, *post_norm;
    void *keys, *values;  // of page 0, head 0, token 0
    int64_t window;       // 0: no window
    packed::Matrix qkv, out, gate_up, down;
};

struct Stack {
    int64_t num_layers, E, Hq, Hkv, D, I;
    double eps, qk_eps, scale;
    int64_t page_size, page_stride, head_stride;  // strides in elements; tokens of a head are adjacent
    const Layer* layers;
};

struct DecoderBatch {
    int64_t T, S, P;
    const int32_t *query_start, *kv_len, *page_table;
    const int64_t* slots;
    const void *cos, *sin;               // [T, D]
    const LayerDeltas* const* adapters;  // of each row, all layers; null: no row has one, or this row has none
    int64_t rank;                        // the largest
    int64_t chunk_from;                  // rows from which a sequence's attention may run by AMX (amx_attention.h)
};

}  // extern "C"

namespace {

using packed::PANEL;

// --- attention -------------------------------------------------------------------------------------------------------

// The attention of all layers of a pass, for sequences of `least` rows or more, and fewer than `most`. Threads take items one
// after another; layers of one window share a plan.
template <class T, class Worker>
class Attention {
   public:
    Attention(const Stack& s, const DecoderBatch& b, T* qkv, T* attended, int num_threads, int64_t least, int64_t most) {
        const int64_t width = (s.Hq + 2 * s.Hkv) * s.D;
        for (int64_t l = 0; l < s.num_layers && least < most; ++l) {
            const Layer& layer = s.layers[l];
            paged::Arguments a{b.S, b.P, s.Hq, s.Hkv, s.D, s.D, s.page_size};
            a.q_token = width, a.q_head = s.D, a.v_token = s.D;
            a.k_page = a.v_page = s.page_stride, a.k_head = a.v_head = s.head_stride;
            a.window = layer.window, a.scale = s.scale;
            a.q = qkv, a.k = layer.keys, a.v = layer.values, a.out = attended;
            a.query_start = b.query_start, a.kv_len = b.kv_len, a.page_table = b.page_table;
            int64_t same = 0;
            while (same < int64_t(plans_.size()) && s.layers[plans_[same].layer].window != layer.window) ++same;
            if (same == int64_t(plans_.size()))
                plans_.push_back({l, paged::make_plan<Worker>(a, num_threads, least, most)});
            layers_.push_back({a, same, counters_});
            counters_ += plans_[same].plan.num_counters;
            partials_ = std::max(partials_, plans_[same].plan.partial_floats);
        }
        memory_.reset(new float[partials_]);
        done_.reset(new std::atomic<int>[counters_ + s.num_layers]());
    }

    // A thread's share of one layer.
    void run(int64_t layer) {
        if (layers_.empty() || plans_[layers_[layer].plan].plan.items.empty()) return;
        const auto& [arguments, number, counter] = layers_[layer];
        const paged::Plan& plan = plans_[number].plan;
        Worker worker(arguments, plan, memory_.get(), done_.get() + counter);
        std::atomic<int>& next = done_[counters_ + layer];
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int(plan.items.size());) worker.run(plan.items[i]);
    }

   private:
    struct OfLayer {
        paged::Arguments arguments;
        int64_t plan, counter;
    };
    struct OfWindow {
        int64_t layer;
        paged::Plan plan;
    };
    std::vector<OfLayer> layers_;
    std::vector<OfWindow> plans_;
    int64_t counters_ = 0, partials_ = 0;
    std::unique_ptr<float[]> memory_;
    std::unique_ptr<std::atomic<int>[]> done_;
};

template <class T>
using NativeAttention = Attention<T, paged::Worker<T, std::conditional_t<std::is_same_v<T, bf16>, paged::ForBf16, paged::Floats>>>;
#if defined(WITH_AMX)
template <class T>
using ChunkAttention = std::conditional_t<std::is_same_v<T, bf16>, Attention<T, paged::TileWorker>, NativeAttention<T>>;
#else
template <class T>
using ChunkAttention = NativeAttention<T>;
#endif

// --- adapters --------------------------------------------------------------------------------------------------------

// What adapters add to the outputs of matrices of one input.
template <class T>
class Deltas {
   public:
    explicit Deltas(const DecoderBatch& b) : b_(b) {
        if (b.adapters) inner_.reset(new float[b.T * NUM_DELTAS * b.rank]);
    }

    // This thread's share of A x, for the rows x [T, K]. Other threads need it: they wait at `barrier`.
    void shrink(const T* x, int64_t K, int64_t layer, std::initializer_list<DeltaOf> parts, int tid, int nt, Barrier& barrier) {
        if (!b_.adapters) return;
        int64_t task = 0;
        for (DeltaOf part : parts)
            low_rank::for_blocks(b_.adapters, 0, b_.T, [&](int64_t t, auto rows) {
                const Delta& delta = b_.adapters[t][layer].of[part];
                if (task++ % nt == tid)
                    low_rank::shrink<decltype(rows)::value>(delta, x + t * K, K, 0, delta.rank, inner(t, part), NUM_DELTAS * b_.rank);
            });
        barrier.wait();
    }

    // Returns LANES outputs y of row t from output n of a matrix on, with what is added, for the caller to round.
    vec add(vec y, int64_t t, int64_t layer, DeltaOf part, int64_t n) const {
        if (!b_.adapters || !b_.adapters[t]) return y;
        const Delta& delta = b_.adapters[t][layer].of[part];
        return delta.rank ? rounded<T>(y) + rounded<T>(low_rank::expand<T>(delta, inner(t, part), n)) : y;
    }

   private:
    float* inner(int64_t t, DeltaOf part) const { return inner_.get() + (t * NUM_DELTAS + part) * b_.rank; }

    const DecoderBatch& b_;
    std::unique_ptr<float[]> inner_;  // [T, NUM_DELTAS, rank]
};

// --- layers ----------------------------------------------------------------------------------------------------------

// Computes all layers over hidden [T, E], in place. scratch: T * (E + (Hq + 2 Hkv) D + Hq D + I) elements.
template <class X>
void decode_stack(const Stack& s, const DecoderBatch& b, X* hidden, X* scratch, int num_threads) {
    const int64_t T = b.T, E = s.E, QKV = (s.Hq + 2 * s.Hkv) * s.D, A = s.Hq * s.D, W = s.Hkv * s.D, I = s.I;
    X* normed = scratch;
    X* qkv = normed + T * E;
    X* attended = qkv + T * QKV;
    X* activated = attended + T * A;
    const X *cos = static_cast<const X*>(b.cos), *sin = static_cast<const X*>(b.sin);
    Barrier barrier;
    Deltas<X> deltas(b);
    NativeAttention<X> attention(s, b, qkv, attended, num_threads, 0, b.chunk_from);
    ChunkAttention<X> chunks(s, b, qkv, attended, num_threads, b.chunk_from, INT64_MAX);
#if defined(ROUNDS_ROWS)
    packed::Rows rows(T, std::max({E, A, I}));
#endif

#pragma omp parallel num_threads(num_threads)
    {
        const int tid = omp_get_thread_num(), nt = omp_get_num_threads();
        const OwnCore core(tid, nt);
#pragma omp single
        barrier.size = nt;
        const int64_t t0 = T * tid / nt, t1 = T * (tid + 1) / nt;

        // y = x w, LANES outputs at a time: `write(t, column, y)`. Other threads have finished x [T, K]. `next` is read next.
        auto multiply = [&](auto panels, const X* x, const packed::Matrix& w, const packed::Matrix& next, auto write) {
            auto each = [&](int64_t t, int64_t n, auto& acc) {
                constexpr int V = sizeof(acc) / sizeof(vec);
                for (int v = 0; v < V; ++v) write(t, n * PANEL + v * LANES, acc[v]);
            };
#if defined(ROUNDS_ROWS)
            if (packed::is_rounded(w)) {
                for (int64_t t = t0; t < t1; ++t) rows.round(t, x + t * w.K, w);
                barrier.wait();
                return packed::multiply_rounded(rows, T, w, tid, nt, each);
            }
#endif
            packed::multiply_rows<decltype(panels)::value>(x, T, w, next, tid, nt, each);
        };
        const std::integral_constant<int, 2> two;
        const std::integral_constant<int, packed::PARTS == 1 ? 3 : 1> three;

        for (int64_t l = 0; l < s.num_layers; ++l) {
            const Layer& layer = s.layers[l];
            auto normalise = [&](const void* weight) {
                for (int64_t t = t0; t < t1; ++t)
                    steps::rms_norm(hidden + t * E, static_cast<const X*>(weight), float(s.eps), E, normed + t * E);
                barrier.wait();
            };
            auto shrink = [&](const X* x, int64_t K, std::initializer_list<DeltaOf> parts) { deltas.shrink(x, K, l, parts, tid, nt, barrier); };
            auto add = [&](vec y, int64_t t, DeltaOf part, int64_t n) __attribute__((always_inline)) { return deltas.add(y, t, l, part, n); };
            normalise(layer.input_norm);
            shrink(normed, E, {Q_DELTA, K_DELTA, V_DELTA});
            multiply(three, normed, layer.qkv, layer.out, [&](int64_t t, int64_t n, vec y) __attribute__((always_inline)) {
                const bool is_q = n < A, is_k = n < A + W;
                narrow(qkv + t * QKV + n, add(y, t, is_q ? Q_DELTA : is_k ? K_DELTA : V_DELTA, is_q ? n : is_k ? n - A : n - A - W));
            });
            barrier.wait();

            const steps::Heads heads{s.Hq, s.Hkv, s.D, s.page_size, s.page_stride, s.head_stride, s.qk_eps,
                                     layer.qkv_bias, layer.q_norm, layer.k_norm, layer.keys, layer.values};
            for (int64_t t = t0; t < t1; ++t)
                steps::finish_heads(heads, qkv + t * QKV, cos + t * s.D, sin + t * s.D, b.slots[t]);
            barrier.wait();

            chunks.run(l);
            attention.run(l);
            barrier.wait();

            auto add_to_hidden = [&](DeltaOf part) {
                return [&, part](int64_t t, int64_t n, vec y) __attribute__((always_inline)) {
                    X* to = hidden + t * E + n;
                    narrow(to, widen(to) + rounded<X>(add(y, t, part, n)));
                };
            };
            shrink(attended, A, {OUT_DELTA});
            multiply(three, attended, layer.out, layer.gate_up, add_to_hidden(OUT_DELTA));
            barrier.wait();

            normalise(layer.post_norm);
            shrink(normed, E, {GATE_DELTA, UP_DELTA});
            // The outputs are 16 gates and then their 16 ups. A gate waits in `activated` for its up, of the same thread.
            multiply(two, normed, layer.gate_up, layer.down, [&](int64_t t, int64_t n, vec y) __attribute__((always_inline)) {
                const int64_t column = n / (2 * PANEL) * PANEL + n % PANEL;
                X* to = activated + t * I + column;
                if (n / PANEL % 2 == 0) return narrow(to, add(y, t, GATE_DELTA, column));
                y = rounded<X>(add(y, t, UP_DELTA, column));
                narrow(to, steps::silu<X>(widen(to)) * y);
            });
            barrier.wait();

            shrink(activated, I, {DOWN_DELTA});
            multiply(three, activated, layer.down, s.layers[(l + 1) % s.num_layers].qkv, add_to_hidden(DOWN_DELTA));
            barrier.wait();
        }
    }
}

}  // namespace

extern "C" {

// Computes all layers over hidden [T, E], in place; see `decode_stack`. ROW_TYPE: float, or bf16 on CPUs with AVX512-BF16.
void crossdock_decode_stack(const Stack* stack, const DecoderBatch* batch, ROW_TYPE* hidden, ROW_TYPE* scratch, int num_threads) {
    decode_stack(*stack, *batch, hidden, scratch, num_threads);
}
}
