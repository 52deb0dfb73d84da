// The layers of a stack in one call, for new tokens after cached ones and for whole texts. All threads run one branch
// at a time. With many rows, each thread takes chunks through the phases by itself, up to the point where rows see the
// keys of other chunks.

#include "../describe.h"
#include "chunks.h"

namespace {

// Run rows from branch to branch, like `Team::run`, with several threads that have an arena each.
template <typename Traits, typename ArenaOf>
void run_by_team(
    const Rows& rows, const StackCall& call, const Keys* keys, int64_t from, int64_t to, int threads,
    const ArenaOf& arena_of) {
  const Arena::Frame frame(arena_of(0));
  Team<Traits> team(rows, call.branches, keys, call.count, arena_of(0));
#pragma omp parallel num_threads(threads)
  team.run(from, to, arena_of(omp_get_thread_num()));
}

template <typename Traits>
void run_stack(const StackCall& call, int64_t threads) {
  const Workspace workspace(threads);
  int64_t widest = 1;
  for (int64_t b = 0; b < call.count; ++b)
    if (call.branches[b].function != Function::FEED_FORWARD) widest = std::max(widest, call.branches[b].first.outputs);
  const Rows rows{
      call.x, workspace[0].take<float>(call.M * call.D), workspace[0].take<float>(call.M * widest), call.M, call.D};
  const std::vector<Chunk> chunks = chunks_of(call);
  if (int64_t(chunks.size()) < call.most_threads) {
    const auto arena_of = [&](int thread) -> Arena& { return workspace[thread]; };
    return run_by_team<Traits>(rows, call, call.keys, -1, call.count, int(threads), arena_of);
  }
  // Rows see keys of other chunks: all chunks append their keys before one attends.
  int64_t from = -1;
  for (int64_t to = 0; to <= call.count; ++to) {
    if (to < call.count && !call.keys[to].appends) continue;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads))
    for (int64_t number = 0; number < int64_t(chunks.size()); ++number) {
      const Chunk& chunk = chunks[number];
      const int64_t D = call.D;
      const Rows own{call.x + chunk.first * D, rows.shared + chunk.first * D, rows.queries + chunk.first * widest,
                     chunk.last - chunk.first, D};
      Arena& arena = workspace[omp_get_thread_num()];
      run_by_team<Traits>(own, call, chunk.keys.data(), from, to, 1, [&](int) -> Arena& { return arena; });
    }
    from = to;
  }
}

}  // namespace

KERNEL void stack(const StackCall* call, int64_t threads) {
  switch (call->weight_kind) {
    case WeightKind::FLOAT32: return run_stack<Float32>(*call, threads);
    case WeightKind::MIXED: return run_stack<Mixed>(*call, threads);
    case WeightKind::INT8: return run_stack<Int8>(*call, threads);
#ifdef HAS_NIBBLES
    case WeightKind::INT4: return run_stack<Int4>(*call, threads);
#endif
  }
}
