// Chunks of rows, each computed by one thread, so that its activations stay in the thread's own cache.

#pragma once

#include "branches.h"

namespace {

constexpr int64_t CHUNK_ROWS = 256, LEAST_ROWS = 128;
constexpr double KEY_COST = 2;  // cost of a product of attention relative to a product of a layer

struct Chunk {
  int64_t first, last;          // rows
  std::vector<int64_t> cu_seqlens;  // of the chunk's texts
  std::vector<Keys> keys;
};

// Number of rows in a chunk, of M rows in all: each thread gets equally many chunks.
int64_t rows_of_chunk(int64_t M, int64_t threads) {
  const int64_t turns = (M + threads * CHUNK_ROWS - 1) / (threads * CHUNK_ROWS);
  return (M + threads * turns - 1) / (threads * turns);
}

// The keys of each branch for texts [begin, end), or for rows of one of these texts.
Chunk chunk_of(const Keys* keys, int64_t count, const Keys& texts, int64_t begin, int64_t end, int64_t first, int64_t last) {
  Chunk chunk{first, last, {texts.cu_seqlens + begin, texts.cu_seqlens + end + 1}, {keys, keys + count}};
  for (int64_t& start : chunk.cu_seqlens) start = std::min(std::max(start, first), last) - first;
  for (Keys& one : chunk.keys) {
    if (one.key) by_kind(one.kind, [&](auto number) {
      one.key = static_cast<decltype(number)*>(one.key) + begin * one.row_stride;
      one.value = static_cast<decltype(number)*>(one.value) + begin * one.row_stride;
    });
    if (one.key_scales) one.key_scales += begin * one.row_stride / one.key_stride;
    if (one.value_scales) one.value_scales += begin * one.row_stride / one.key_stride;
    if (one.mask) one.mask += begin * one.mask_stride;
    if (one.first_keys) one.first_keys += begin;
    if (one.cos) one.cos += first * one.angle_stride;
    if (one.sin) one.sin += first * one.angle_stride;
    one.groups = end - begin, one.cu_seqlens = chunk.cu_seqlens.data(), one.count -= texts.cu_seqlens[end] - last;
  }
  return chunk;
}

// Cost of one more visible key for a row, in addition to its products.
double cost_of_key(const StackCall& call) {
  double of_keys = 0, of_rows = 1;
  for (const Branch* branch = call.branches; branch < call.branches + call.count; ++branch) {
    for (const Matrix* one : {&branch->first, &branch->second, &branch->third, &branch->last})
      if (one->weight) of_rows += double(one->inputs) * one->outputs;
    if (branch->function == Function::SELF_ATTENTION) of_keys += KEY_COST * 2 * branch->heads * branch->head_size;
  }
  return of_keys / of_rows;
}

// The number of rows, of T, that have a given part of the work; `before` keys precede the first row.
int64_t end_of_work(double part, int64_t T, int64_t before, double cost) {
  const double row = 1 + cost * before, work = part * T * (row + cost * T / 2);
  const double end = 2 * work / (row + std::sqrt(row * row + 2 * cost * work));
  return std::min(T, int64_t(end / TILE + 0.5) * TILE);
}

// Chunks of whole texts, or of the rows of one long text with a cache, which see the keys before them. Later chunks see
// more keys and have fewer rows.
std::vector<Chunk> chunks_of_texts(
    const Keys* keys, int64_t count, const Keys& texts, int64_t threads, double key_cost) {
  const int64_t most = rows_of_chunk(texts.cu_seqlens[texts.groups], threads);
  std::vector<Chunk> chunks;
  for (int64_t begin = 0, end = 1; end <= texts.groups; ++end) {
    const int64_t first = texts.cu_seqlens[begin], last = texts.cu_seqlens[end], start = texts.cu_seqlens[end - 1];
    if (last - first < most && end < texts.groups) continue;
    if (!texts.appends || last - start <= most) chunks.push_back(chunk_of(keys, count, texts, begin, end, first, last));
    else {
      if (begin < end - 1) chunks.push_back(chunk_of(keys, count, texts, begin, end - 1, first, start));
      const int64_t T = last - start, pieces = (T + most - 1) / most;
      for (int64_t piece = 0, m = start; piece < pieces; ++piece) {
        const int64_t before = std::max(int64_t(0), texts.count - T);
        const int64_t next = piece + 1 < pieces ? start + end_of_work(double(piece + 1) / pieces, T, before, key_cost) : last;
        if (next > m) chunks.push_back(chunk_of(keys, count, texts, end - 1, end, m, next));
        m = next;
      }
    }
    begin = end;
  }
  return chunks;
}

// The rows of a call in chunks; empty if a row sees keys outside of its own chunk that are not before it.
std::vector<Chunk> chunks_of(const StackCall& call) {
  const Branch* branches = call.branches;
  const Keys *keys = call.keys, *first = nullptr;
  if (call.M < LEAST_ROWS) return {};
  for (int64_t b = 0; b < call.count; ++b) {
    if (branches[b].function == Function::FEED_FORWARD) continue;
    if (branches[b].function == Function::MEMORY_ATTENTION || keys[b].row_index) return {};
    if (!keys[b].cu_seqlens || (keys[b].appends && keys[b].window_after > 0)) return {};
    if (!first) first = keys + b;
  }
  return first ? chunks_of_texts(keys, call.count, *first, call.most_threads, cost_of_key(call)) : std::vector<Chunk>();
}

}  // namespace
