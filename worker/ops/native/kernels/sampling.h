// From logits to tokens, as worker/sampler.py and worker/filters.py define it, without sorting.
//
// In the order of falling logits, equal ones by rising id, each filter keeps a prefix. A prefix is
// a least logit and how many of the ids with just that logit stay; it is found by counting logits
// into bins, and the bin in which the prefix ends into finer ones, until few are left in it.
// A thread takes a row at a time. Weights (probabilities times a constant) are float32, their
// sums float64, and every sum is taken in an order that the row alone decides.

namespace STOKER_LEVEL {

typedef float HalfFloats __attribute__((vector_size(STOKER_VECTOR_BYTES / 2)));
typedef double Doubles __attribute__((vector_size(STOKER_VECTOR_BYTES)));

constexpr int64_t kLogitsBlock = 256;  // ids whose largest logit, or sum of weights, is kept
constexpr int32_t kBins = 1024;
constexpr int64_t kSorted = 128;  // so many logits are sorted instead of counted into finer bins
constexpr int64_t kRanked = 64;   // up to this top_k the largest logits of blocks give a bound
constexpr int64_t kAll = INT64_MAX;
constexpr double kLeastLogWeight = -87.0;  // smaller weights leave float32; nobody draws them

struct LogitsRow {
    const float* logits;
    int64_t size;
    float best;         // the largest, whose weight is 1
    float sharp;        // 1 / temperature
    float* block_best;  // [blocks]
    double* block_sum;  // [blocks]

    int64_t num_blocks() const { return (size + kLogitsBlock - 1) / kLogitsBlock; }
};

struct Leader {
    float best;
    int64_t token;
    bool has_nan;
};

// The ids that stay: all above `least`, and the first `ties` at it. What they weigh together.
struct Prefix {
    float least;
    int64_t ties;
    double mass;
};

// Which prefix is wanted: the shortest that has so many ids, or that mass.
struct Until {
    int64_t count;
    double mass;
};

// Logits from `at` on; -infinity past the end.
STOKER_INLINE Floats logits_at(const LogitsRow& row, int64_t at) {
    if (at + kLanes <= row.size) return load(row.logits + at);
    float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = at + lane < row.size ? row.logits[at + lane] : -__builtin_inff();
    }
    return load(lanes);
}

STOKER_INLINE Floats weights_of(const LogitsRow& row, Floats logits) {
    return exp((logits - splat(row.best)) * splat(row.sharp));
}

STOKER_INLINE void add_to(Doubles sums[2], Floats values) {
    HalfFloats halves[2];
    __builtin_memcpy(halves, &values, sizeof values);
    for (int half = 0; half < 2; ++half) {
        sums[half] += __builtin_convertvector(halves[half], Doubles);
    }
}

STOKER_INLINE double sum_of(const Doubles sums[2]) {
    const Doubles both = sums[0] + sums[1];
    double sum = 0.0;
    for (int64_t lane = 0; lane < kLanes / 2; ++lane) sum += both[lane];
    return sum;
}

// The lowest id of the largest logit; NaN is passed over.
static Leader leader_of(const LogitsRow& row) {
    Ints is_nan = {};
    Leader leader = {-__builtin_inff(), 0, false};
    int64_t found = 0;
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
        Floats most[4];
        for (Floats& each : most) each = splat(-__builtin_inff());
        for (int64_t at = block * kLogitsBlock; at < (block + 1) * kLogitsBlock; at += 4 * kLanes) {
            for (int64_t chain = 0; chain < 4; ++chain) {
                const Floats logits = logits_at(row, at + chain * kLanes);
                is_nan |= logits != logits;
                most[chain] = max(logits, most[chain]);
            }
        }
        const float best = max_lane(max(max(most[0], most[1]), max(most[2], most[3])));
        row.block_best[block] = best;
        if (best > leader.best) leader.best = best, found = block;
    }
    leader.has_nan = any(is_nan);
    leader.token = found * kLogitsBlock;
    while (leader.token < row.size && !(row.logits[leader.token] == leader.best)) ++leader.token;
    if (leader.token == row.size) leader.token = 0;  // nothing but NaN
    return leader;
}

// Which logits have at least this weight: those from here on.
STOKER_INLINE float logit_of(const LogitsRow& row, double log_weight) {
    if (log_weight < kLeastLogWeight) log_weight = kLeastLogWeight;
    const double exact = double(row.best) + log_weight / double(row.sharp);
    const float near = float(exact);
    return double(near) < exact ? __builtin_nextafterf(near, __builtin_inff()) : near;
}

// No fewer than `count` (at most kRanked) logits are at least this.
static float bound_by_blocks(const LogitsRow& row, int64_t count) {
    if (count > row.num_blocks()) return -__builtin_inff();
    float ranked[kRanked];  // the `count` largest yet, falling
    for (int64_t place = 0; place < count; ++place) ranked[place] = -__builtin_inff();
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
        const float best = row.block_best[block];
        if (!(best > ranked[count - 1])) continue;
        int64_t place = count - 1;
        for (; place > 0 && ranked[place - 1] < best; --place) ranked[place] = ranked[place - 1];
        ranked[place] = best;
    }
    return ranked[count - 1];
}

// In which of kBins bins of equal width over [low, high] logits lie; that of `high` is the first.
STOKER_INLINE Ints bins_of(Floats logits, float low, float high) {
    const Floats width = splat(high > low ? high - low : 1.0f);
    const Floats place = (splat(high) - logits) / width * splat(float(kBins));
    const Floats last = splat(float(kBins - 1));
    return __builtin_convertvector(place < last ? place : last, Ints);
}

// Call `use(logits, mask)` for the vectors that hold a logit of [low, high].
template <typename Use>
STOKER_INLINE void for_between(const LogitsRow& row, float low, float high, Use use) {
    for (int64_t at = 0; at < row.size; at += kLanes) {
        const Floats logits = logits_at(row, at);
        const Ints is_in = (logits >= splat(low)) & (logits <= splat(high));
        if (any(is_in)) use(logits, is_in);
    }
}

// Call `use(lane)` for the set lanes of a mask.
template <typename Use>
STOKER_INLINE void for_lanes(Ints mask, Use use) {
    for (uint32_t bits = bits_of(mask); bits != 0; bits &= bits - 1) {
        use(int64_t(__builtin_ctz(bits)));
    }
}

static double mass_from(const LogitsRow& row, float least) {
    Doubles sums[2] = {};
    for_between(row, least, row.best, [&](Floats logits, Ints is_in) {
        add_to(sums, is_in ? weights_of(row, logits) : zeros());
    });
    return sum_of(sums);
}

// How the `count` logits of one value, with `above` before them, end the prefix.
STOKER_INLINE Prefix end_among_equals(const LogitsRow& row, float logit, int64_t count,
                                      int64_t above, double mass_above, Until until) {
    const double weight = double(weights_of(row, splat(logit))[0]);
    const double needed = __builtin_ceil((until.mass - mass_above) / weight);
    int64_t kept = until.count - above < count ? until.count - above : count;
    if (needed < double(kept)) kept = needed < 1.0 ? 1 : int64_t(needed);
    return {logit, kept < count ? kept : kAll, mass_above + double(kept) * weight};
}

// How a few logits, `values`, with `above` before them, end the prefix.
STOKER_INLINE Prefix end_among_few(const LogitsRow& row, float* values, int64_t count,
                                   int64_t above, double mass, Until until) {
    for (int64_t sorted = 1; sorted < count; ++sorted) {
        const float value = values[sorted];
        int64_t place = sorted;
        for (; place > 0 && values[place - 1] < value; --place) values[place] = values[place - 1];
        values[place] = value;
    }
    int64_t kept = 0, ties = 0;
    while (kept < count && above + kept < until.count && mass < until.mass) {
        ties = kept > 0 && values[kept] == values[kept - 1] ? ties + 1 : 1;
        mass += double(weights_of(row, splat(values[kept]))[0]);
        ++kept;
    }
    const float least = values[kept - 1];
    return {least, kept < count && values[kept] == least ? ties : kAll, mass};
}

// The shortest prefix that has what `until` says, or all logits from `low` on.
static Prefix prefix_until(const LogitsRow& row, float low, Until until) {
    float high = row.best;
    int64_t above = 0;
    double mass = 0.0;
    for (;;) {
        int32_t counts[kBins] = {};
        double masses[kBins] = {};
        for_between(row, low, high, [&](Floats logits, Ints is_in) {
            int32_t bins[kLanes];
            float weights[kLanes];
            const Ints places = bins_of(logits, low, high);
            __builtin_memcpy(bins, &places, sizeof bins);
            store(weights, weights_of(row, logits));
            for_lanes(is_in, [&](int64_t lane) {
                ++counts[bins[lane]];
                masses[bins[lane]] += double(weights[lane]);
            });
        });
        int32_t bin = 0;
        for (; bin < kBins; ++bin) {
            const bool is_last = above + counts[bin] >= until.count;
            if (counts[bin] > 0 && (is_last || mass + masses[bin] >= until.mass)) break;
            above += counts[bin];
            mass += masses[bin];
        }
        if (bin == kBins) return {low, kAll, mass};

        float few[kSorted];
        int64_t num_few = 0;
        float least = high, most = low;
        for_between(row, low, high, [&](Floats logits, Ints is_in) {
            float lanes[kLanes];
            store(lanes, logits);
            for_lanes(is_in & (bins_of(logits, low, high) == bin), [&](int64_t lane) {
                const float logit = lanes[lane];
                if (num_few < kSorted) few[num_few++] = logit;
                least = logit < least ? logit : least;
                most = logit > most ? logit : most;
            });
        });
        if (least == most) {
            return end_among_equals(row, least, counts[bin], above, mass, until);
        }
        if (counts[bin] <= kSorted) return end_among_few(row, few, num_few, above, mass, until);
        low = least, high = most;
    }
}

// The ids that stay by the filters.
static Prefix survivors_of(const LogitsRow& row, int64_t top_k, double top_p, double min_p) {
    const float least =
        logit_of(row, min_p > 0.0 ? __builtin_log(min_p) : kLeastLogWeight);
    Prefix kept = {least, kAll, __builtin_inf()};
    if (top_k < row.size) {
        const float bound = top_k <= kRanked ? bound_by_blocks(row, top_k) : least;
        kept = prefix_until(row, bound > least ? bound : least, {top_k, __builtin_inf()});
        if (top_p < 1.0) kept = prefix_until(row, kept.least, {top_k, top_p * kept.mass});
    } else if (top_p < 1.0) {
        const double mass = mass_from(row, least);
        // Smaller weights do not sum up to what top_p leaves out, nor to half of it.
        const double spare = (1.0 - top_p) * mass / (2.0 * double(row.size));
        const float bound = logit_of(row, __builtin_log(spare));
        kept = prefix_until(row, bound > least ? bound : least, {kAll, top_p * mass});
    }
    return kept;
}

// The first id at which the running sum of what stays exceeds `number` times the sum.
static int64_t first_above(const LogitsRow& row, Prefix kept, double number) {
    int64_t last_tie = row.size;
    if (kept.ties != kAll) {
        int64_t ties = kept.ties;
        for (last_tie = 0; !(row.logits[last_tie] == kept.least && --ties == 0);) ++last_tie;
    }
    const float next = __builtin_nextafterf(kept.least, __builtin_inff());
    Ints lanes;
    for (int32_t lane = 0; lane < int32_t(kLanes); ++lane) lanes[lane] = lane;
    const auto staying = [&](int64_t at, Floats& weights) {
        const Ints may_tie = lanes + int32_t(at) <= Ints{} + int32_t(last_tie);
        const Floats logits = logits_at(row, at);
        const Ints stays = logits >= (may_tie ? splat(kept.least) : splat(next));
        if (!any(stays)) return false;
        weights = stays ? weights_of(row, logits) : zeros();
        return true;
    };
    double total = 0.0;
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
        Doubles sums[2] = {};
        Floats weights;
        for (int64_t at = block * kLogitsBlock; at < (block + 1) * kLogitsBlock; at += kLanes) {
            if (staying(at, weights)) add_to(sums, weights);
        }
        total += row.block_sum[block] = sum_of(sums);
    }
    const double goal = number * total;
    // The last block with a weight, if rounding lets no running sum exceed the goal.
    int64_t found = 0;
    double before = 0.0, running = 0.0;
    for (int64_t block = 0; block < row.num_blocks() && running <= goal; ++block) {
        if (row.block_sum[block] <= 0.0) continue;
        found = block;
        before = running;
        running += row.block_sum[block];
    }
    float weights[kLogitsBlock];
    for (int64_t at = 0; at < kLogitsBlock; at += kLanes) {
        Floats some = zeros();
        staying(found * kLogitsBlock + at, some);
        store(weights + at, some);
    }
    int64_t token = found * kLogitsBlock;
    for (int64_t i = 0; i < kLogitsBlock; ++i) {
        if (weights[i] <= 0.0f) continue;
        token = found * kLogitsBlock + i;
        before += double(weights[i]);
        if (before > goal) break;
    }
    return token;
}

STOKER_INLINE uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// As worker/chance.py.
STOKER_INLINE double uniform(int64_t seed, int64_t position) {
    const uint64_t step = (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u;
    return double(mixed(mixed(uint64_t(seed)) + step) >> 11) * 0x1p-53;
}

static void draw(const stoker::DrawArgs& args, const stoker::Share& share) {
    for (int64_t index; (index = share.take()) < args.num_rows;) {
        LogitsRow row = {args.logits + index * args.stride, args.vocab_size, 0.0f, 0.0f, nullptr,
                         static_cast<double*>(share.scratch)};
        row.block_best = reinterpret_cast<float*>(row.block_sum + row.num_blocks());
        const Leader leader = leader_of(row);
        args.best[index] = leader.has_nan ? __builtin_nanf("") : leader.best;
        args.token[index] = leader.token;
        const bool is_finite = __builtin_isfinite(leader.best) && !leader.has_nan;
        if (args.temperature[index] <= 0.0f || !is_finite) continue;
        row.best = leader.best;
        row.sharp = 1.0f / args.temperature[index];
        const Prefix kept =
            survivors_of(row, args.top_k[index], args.top_p[index], args.min_p[index]);
        const double number = uniform(args.seed[index], args.position[index]);
        args.token[index] = first_above(row, kept, number);
    }
}

}  // namespace STOKER_LEVEL
