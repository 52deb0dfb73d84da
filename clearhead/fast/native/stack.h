// What the compiled layers of a stack read; fast/native/stack.py has the same structures.

#pragma once

#include <cstdint>

enum NormKind : int32_t { NO_NORM, LAYER_NORM, RMS_NORM };
enum KeyKind : int64_t { FLOAT_KEYS, HALF_KEYS, BYTE_KEYS };
enum Function : int32_t { FEED_FORWARD, SELF_ATTENTION, MEMORY_ATTENTION };

struct Norm {
  const float* weight;  // null: ones
  const float* bias;    // null: zeros
  float eps;
  int32_t kind;
};

struct Matrix {
  const void* weight;   // [N, K]; null: the branch has none
  const float* bias;    // [N] or null
  const float* scales;  // of weights in 8 bits [N]
  int64_t outputs, inputs;
  int64_t turned_stride;  // above 0: fp32 weights [K, N] whose rows lie so many numbers apart
};

struct Branch {
  Norm shared, pre, post, out;
  Matrix first, second, third, last;  // query, key, value, out; or up, gate, none, down
  Norm query_norm, key_norm;          // over each head
  const float* sink;                  // [H] or null
  float scale, score_scale, soft_cap;  // soft_cap 0: none
  int32_t function, activation, heads, kv_heads, head_size, is_first, is_last, norms_after_rotation;
};

// The keys and values of one attention in one call. Groups are rows with the same keys.
struct Keys {
  void* key;
  void* value;
  int64_t row_stride, head_stride, key_stride;  // in numbers: between cache rows, heads, keys
  int64_t count;                                // keys of each group, with those that are new; of the longest text
  const int64_t* starts;     // first row of each group [groups + 1], whose keys are its own rows; null: rows_per_group
  int64_t groups, rows_per_group;
  int64_t before, after;     // how many keys before and behind its own place a row sees; rows are the last keys
  const int32_t* origin;     // cache row of each key of a group [groups, S]; null: the number of the group
  int64_t origin_stride;     // 0: one for all keys of a group [groups]
  const uint8_t* mask;       // of each group [groups, S], 1 = may attend; null: all may
  int64_t mask_stride;
  const float* bias;         // on the scores [M, H, S]; null: none
  int64_t bias_row_stride, bias_head_stride;
  const float* cos;          // of the rotation [M, half]; null: none
  const float* sin;
  int64_t angle_stride, half;
  int64_t kind;              // of the numbers of keys and values
  float* key_scales;         // of keys in 8 bits, one for each; their strides are those of the keys / the head size
  float* value_scales;
  int64_t has_cache;         // new keys and values go into it
};

extern "C" {

// Whether many rows are multiplied as squares.
void find_squares(int64_t* are_there);

// x [M, D] is changed in place; keys has an entry for each branch, those of feed-forward networks unused.
void stack_float32(float* x, const Branch* branches, const Keys* keys, long count, long M, long D);
void stack_mixed(float* x, const Branch* branches, const Keys* keys, long count, long M, long D);
void stack_int8(float* x, const Branch* branches, const Keys* keys, long count, long M, long D);
}
