// The last error, and attributes for callers that are not MindSpore (tests and benchmarks, by ctypes).
#include "aot.h"

#include <map>
#include <mutex>

namespace telechat {
namespace {

std::mutex error_lock;
std::string last_error;

class PlainAttributes : public AotExtra {
 public:
  ~PlainAttributes() override { delete kernel_data_; }
  bool HasAttr(std::string name) override { return numbers.count(name) || lists.count(name); }
  bool GetAttrBool(std::string name) override { return numbers.at(name) != 0; }
  int64_t GetAttrInt(std::string name) override { return static_cast<int64_t>(numbers.at(name)); }
  float GetAttrFloat(std::string name) override { return static_cast<float>(numbers.at(name)); }
  std::string GetAttrStr(std::string) override { return {}; }
  std::vector<int64_t> GetAttrIntVec(std::string name) override { return lists.at(name); }
  std::vector<float> GetAttrFloatVec(std::string) override { return {}; }
  std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string) override { return {}; }
  std::vector<std::vector<float>> GetAttrFloat2DVec(std::string) override { return {}; }

  std::map<std::string, double> numbers;
  std::map<std::string, std::vector<int64_t>> lists;
};

}  // namespace

void set_last_error(const std::string& message) {
  std::lock_guard<std::mutex> guard(error_lock);
  last_error = message;
}

}  // namespace telechat

using telechat::PlainAttributes;

// Copy the last error into `text`; return its length.
extern "C" int64_t telechat_last_error(char* text, int64_t room) {
  std::lock_guard<std::mutex> guard(telechat::error_lock);
  std::snprintf(text, static_cast<size_t>(room), "%s", telechat::last_error.c_str());
  return static_cast<int64_t>(telechat::last_error.size());
}

extern "C" void* telechat_attributes_new() { return static_cast<AotExtra*>(new PlainAttributes); }
extern "C" void telechat_attributes_free(void* p) { delete static_cast<AotExtra*>(p); }
extern "C" void telechat_attributes_number(void* p, const char* name, double value) {
  static_cast<PlainAttributes*>(static_cast<AotExtra*>(p))->numbers[name] = value;
}
extern "C" void telechat_attributes_list(void* p, const char* name, const int64_t* values, int64_t count) {
  static_cast<PlainAttributes*>(static_cast<AotExtra*>(p))->lists[name].assign(values, values + count);
}
// Bytes of workspace that Init asked for.
extern "C" int64_t telechat_attributes_workspace(void* p) {
  auto* extra = static_cast<AotExtra*>(p);
  return extra->workspace_.empty() ? 0 : static_cast<int64_t>(extra->workspace_[0]);
}
// Shapes of the results by `infer` (an <Op>InferShape): count (one = 1), then rank and extents of each.
extern "C" int64_t telechat_infer(void* infer, int64_t one, int* ranks, int64_t** shapes, void* extra,
                                  int64_t* result, int64_t room) {
  std::vector<telechat::Shape> all;
  int failed = telechat::guarded("InferShape", [&] {
    auto* x = static_cast<AotExtra*>(extra);
    if (one) {
      all = {reinterpret_cast<telechat::Shape (*)(int*, int64_t**, AotExtra*)>(infer)(ranks, shapes, x)};
    } else {
      all = reinterpret_cast<std::vector<telechat::Shape> (*)(int*, int64_t**, AotExtra*)>(infer)(ranks, shapes, x);
    }
  });
  if (failed) return -1;
  std::vector<int64_t> flat = {static_cast<int64_t>(all.size())};
  for (const auto& shape : all) {
    flat.push_back(static_cast<int64_t>(shape.size()));
    flat.insert(flat.end(), shape.begin(), shape.end());
  }
  if (static_cast<int64_t>(flat.size()) > room) return -1;
  std::copy(flat.begin(), flat.end(), result);
  return static_cast<int64_t>(flat.size());
}
