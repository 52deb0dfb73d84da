// Chunks of rows, each computed by one thread: what it computes stays in its own cache.

#pragma once

#include "branches.h"

namespace {

constexpr int64_t CHUNK_ROWS = 256, LEAST_ROWS = 128;

struct Chunk {
  int64_t first, last;          // rows
  std::vector<int64_t> cu_seqlens;  // of its texts
  std::vector<Keys> keys;
};

// Rows of a chunk, of so many in all: as many chunks for each thread.
int64_t rows_of_chunk(int64_t M, int64_t threads) {
  const int64_t turns = (M + threads * CHUNK_ROWS - 1) / (threads * CHUNK_ROWS);
  return (M + threads * turns - 1) / (threads * turns);
}

// Whole texts, which need no other's rows.
std::vector<Chunk> chunks_of_texts(const Keys* keys, int64_t count, const Keys& texts, int64_t threads) {
  const int64_t most = rows_of_chunk(texts.cu_seqlens[texts.groups], threads);
  std::vector<Chunk> chunks;
  for (int64_t begin = 0, end = 1; end <= texts.groups; ++end) {
    const int64_t first = texts.cu_seqlens[begin], last = texts.cu_seqlens[end];
    if (last - first < most && end < texts.groups) continue;
    Chunk chunk{first, last, {texts.cu_seqlens + begin, texts.cu_seqlens + end + 1}, {keys, keys + count}};
    for (int64_t& start : chunk.cu_seqlens) start -= first;
    for (Keys& one : chunk.keys) one.groups = end - begin, one.cu_seqlens = chunk.cu_seqlens.data();
    chunks.push_back(std::move(chunk));
    begin = end;
  }
  return chunks;
}

// Rows beside a cache: groups side by side, or the rows of a long one in pieces, which see the keys before them.
std::vector<Chunk> chunks_of_groups(const Keys* keys, int64_t count, const Keys& cached, int64_t threads) {
  const int64_t T = cached.rows_per_group, most = rows_of_chunk(cached.groups * T, threads);
  const int64_t together = std::max(int64_t(1), most / T), pieces = (T + most - 1) / most;
  const int64_t piece = round_up((T + pieces - 1) / pieces, BLOCK);
  std::vector<Chunk> chunks;
  for (int64_t group = 0; group < cached.groups; group += together)
    for (int64_t begin = 0; begin < T; begin += piece) {
      const int64_t end = std::min(T, begin + piece), groups = std::min(together, cached.groups - group);
      Chunk chunk{group * T + begin, group * T + begin + groups * (end - begin), {}, {keys, keys + count}};
      for (Keys& one : chunk.keys) {
        by_kind(one.kind, [&](auto number) {
          one.key = static_cast<decltype(number)*>(one.key) + group * one.row_stride;
          one.value = static_cast<decltype(number)*>(one.value) + group * one.row_stride;
        });
        if (one.key_scales) one.key_scales += group * one.row_stride / one.key_stride;
        if (one.value_scales) one.value_scales += group * one.row_stride / one.key_stride;
        if (one.mask) one.mask += group * one.mask_stride;
        one.groups = groups, one.rows_per_group = end - begin, one.count -= T - end;
      }
      chunks.push_back(std::move(chunk));
    }
  return chunks;
}

// The rows of a call in chunks; none where a row sees what is none of its own chunk's, nor before it.
std::vector<Chunk> chunks_of(const StackCall& call) {
  const Branch* branches = call.branches;
  const Keys *keys = call.keys, *first = nullptr;
  if (call.M < LEAST_ROWS) return {};
  for (int64_t b = 0; b < call.count; ++b) {
    if (branches[b].function == Function::FEED_FORWARD) continue;
    if (branches[b].function == Function::MEMORY_ATTENTION || keys[b].row_index || keys[b].bias) return {};
    if (keys[b].appends && (keys[b].window_after > 0 || keys[b].rows_per_group == 1)) return {};
    if (!first) first = keys + b;
  }
  if (!first) return {};
  std::vector<Chunk> chunks = first->cu_seqlens ? chunks_of_texts(keys, call.count, *first, call.most_threads)
                                            : chunks_of_groups(keys, call.count, *first, call.most_threads);
  for (Chunk& chunk : chunks)
    for (Keys& one : chunk.keys) {
      if (one.cos) one.cos += chunk.first * one.angle_stride;
      if (one.sin) one.sin += chunk.first * one.angle_stride;
    }
  return chunks;
}

}  // namespace
