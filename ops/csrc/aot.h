// The border to MindSpore's `ops.Custom(func_type="aot")`: arguments, attributes, shape inference.
//
// An operator is three C functions; the macros below write them around a body that may throw Error:
//
//   struct ScaleState : State { float factor; explicit ScaleState(Attributes& a) : factor(a.number("factor")) {} };
//   TELECHAT_INIT(Scale, ScaleState)                       // once a node; optional
//   TELECHAT_SHAPES(Scale) { return {in.shape(0)}; }       // one list a result
//   TELECHAT_RUN(Scale) {                                  // inputs, then results
//     const auto& s = call.state<ScaleState>();
//     ...call[0].as<const float>("x")...
//   }
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "error.h"

// Mirrors MindSpore's class of the same layout (vtable order checked on 2.9 and 2.10), whose header
// needs half of MindSpore.
struct AotKernelData {
  virtual ~AotKernelData() = default;
};

class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;
  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
  virtual std::string GetAttrStr(std::string name) = 0;
  virtual std::vector<int64_t> GetAttrIntVec(std::string name) = 0;
  virtual std::vector<float> GetAttrFloatVec(std::string name) = 0;
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) = 0;
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) = 0;
  std::vector<size_t> workspace_;
  AotKernelData* kernel_data_{nullptr};
};

namespace telechat {

enum class DType { f32, f16, bf16, i32, i64, u8, b8, f64, other };

inline DType dtype_of(const char* name) {
  struct Row { const char* name; DType type; };
  static const Row rows[] = {{"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16},
                             {"int32", DType::i32},   {"int64", DType::i64},   {"uint8", DType::u8},
                             {"bool", DType::b8},     {"float64", DType::f64}};
  for (const Row& row : rows) {
    if (std::strcmp(name, row.name) == 0) return row.type;
  }
  return DType::other;
}

template <typename T> struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::f32; static constexpr const char* name = "float32"; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::f64; static constexpr const char* name = "float64"; };
template <> struct DTypeOf<int32_t> { static constexpr DType value = DType::i32; static constexpr const char* name = "int32"; };
template <> struct DTypeOf<int64_t> { static constexpr DType value = DType::i64; static constexpr const char* name = "int64"; };
template <> struct DTypeOf<uint8_t> { static constexpr DType value = DType::u8; static constexpr const char* name = "uint8"; };
template <> struct DTypeOf<bool> { static constexpr DType value = DType::b8; static constexpr const char* name = "bool"; };

struct Arg {
  void* data;
  int rank;
  const int64_t* shape;
  const char* type_name;

  DType dtype() const { return dtype_of(type_name); }
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < rank; i++) n *= shape[i];
    return n;
  }
  // Extent of a dimension, negative from the end.
  int64_t dim(int i) const {
    int at = i < 0 ? i + rank : i;
    check(at >= 0 && at < rank, "a tensor of rank %d has no dimension %d", rank, i);
    return shape[at];
  }
  int64_t bytes() const {
    switch (dtype()) {
      case DType::f32: case DType::i32: return 4 * size();
      case DType::f16: case DType::bf16: return 2 * size();
      case DType::i64: case DType::f64: return 8 * size();
      case DType::u8: case DType::b8: return size();
      default: check(false, "a tensor that is copied cannot be %s", type_name); return 0;
    }
  }
  // Product of all dimensions but the last.
  int64_t rows() const { return rank == 0 ? 1 : (shape[rank - 1] ? size() / shape[rank - 1] : 0); }
  template <typename T> T* as(const char* what) const {
    using Plain = std::remove_const_t<T>;
    check(dtype() == DTypeOf<Plain>::value, "%s is %s, expected %s", what, type_name, DTypeOf<Plain>::name);
    return static_cast<T*>(data);
  }
};

// Attributes of a node, read once in its Init.
class Attributes {
 public:
  explicit Attributes(AotExtra* extra) : extra_(extra) { check(extra, "the operator needs attributes and got none"); }
  bool has(const char* name) { return extra_->HasAttr(name); }
  int64_t integer(const char* name) { need(name); return extra_->GetAttrInt(name); }
  int64_t integer(const char* name, int64_t otherwise) { return has(name) ? extra_->GetAttrInt(name) : otherwise; }
  float number(const char* name) { need(name); return extra_->GetAttrFloat(name); }
  bool flag(const char* name) { return has(name) && extra_->GetAttrBool(name); }
  std::vector<int64_t> integers(const char* name) { need(name); return extra_->GetAttrIntVec(name); }
  void workspace(size_t bytes) { extra_->workspace_ = {bytes}; }

 private:
  void need(const char* name) { check(has(name), "attribute '%s' is missing", name); }
  AotExtra* extra_;
};

struct State : AotKernelData {};

class Call {
 public:
  Call(int count, void** data, int* ranks, int64_t** shapes, const char** types, AotExtra* extra)
      : count_(count), data_(data), ranks_(ranks), shapes_(shapes), types_(types), extra_(extra) {}
  int count() const { return count_; }
  Arg operator[](int i) const {
    check(i >= 0 && i < count_, "argument %d of %d", i, count_);
    return {data_[i], ranks_[i], shapes_[i], types_[i]};
  }
  template <typename S> S& state() const {
    check(extra_ && extra_->kernel_data_, "the operator was not initialised");
    return *static_cast<S*>(extra_->kernel_data_);
  }

 private:
  int count_;
  void** data_;
  int* ranks_;
  int64_t** shapes_;
  const char** types_;
  AotExtra* extra_;
};

// Give what only says that an operator has run.
inline void make_token(const Call& call) { *static_cast<float*>(call[call.count() - 1].data) = 0.0f; }

using Shape = std::vector<int64_t>;

struct Inputs {
  int* ranks;
  int64_t** shapes;
  AotExtra* extra;
  Shape shape(int i) const { return Shape(shapes[i], shapes[i] + ranks[i]); }
  int64_t dim(int i, int d) const { return shapes[i][d < 0 ? d + ranks[i] : d]; }
  Attributes attributes() const { return Attributes(extra); }
};

// Run `body`; on an Error keep "<op>: <message>" and return 1.
template <typename Body>
int guarded(const char* op, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    set_last_error(std::string(op) + ": " + e.what());
    return 1;
  }
}

}  // namespace telechat

#define TELECHAT_INIT(Op, StateType)                                                                \
  extern "C" int Op##Init(int*, int64_t**, const char**, AotExtra* extra) {                         \
    return telechat::guarded(#Op, [&] {                                                             \
      telechat::Attributes attributes(extra);                                                       \
      extra->kernel_data_ = new StateType(attributes);                                              \
    });                                                                                             \
  }

// Body returns std::vector<Shape>, one an output. SHAPES1 is for operators with one output: MindSpore
// wants another C type there.
#define TELECHAT_SHAPES(Op)                                                                         \
  static std::vector<telechat::Shape> Op##_shapes(const telechat::Inputs& in);                      \
  extern "C" std::vector<telechat::Shape> Op##InferShape(int* ranks, int64_t** shapes, AotExtra* x) { \
    return Op##_shapes(telechat::Inputs{ranks, shapes, x});                                         \
  }                                                                                                 \
  static std::vector<telechat::Shape> Op##_shapes([[maybe_unused]] const telechat::Inputs& in)

#define TELECHAT_SHAPES1(Op)                                                                        \
  static telechat::Shape Op##_shapes(const telechat::Inputs& in);                                   \
  extern "C" telechat::Shape Op##InferShape(int* ranks, int64_t** shapes, AotExtra* x) {            \
    return Op##_shapes(telechat::Inputs{ranks, shapes, x});                                         \
  }                                                                                                 \
  static telechat::Shape Op##_shapes([[maybe_unused]] const telechat::Inputs& in)

#define TELECHAT_RUN(Op)                                                                            \
  static void Op##_run(const telechat::Call& call);                                                 \
  extern "C" int Op(int count, void** data, int* ranks, int64_t** shapes, const char** types,       \
                    void* /*stream*/, void* extra) {                                                \
    return telechat::guarded(#Op, [&] {                                                             \
      Op##_run(telechat::Call(count, data, ranks, shapes, types, static_cast<AotExtra*>(extra)));   \
    });                                                                                             \
  }                                                                                                 \
  static void Op##_run([[maybe_unused]] const telechat::Call& call)
