// A communication manager and a device target that exist only in name, so that MindSpore's Ascend front end compiles
// the graph of any rank on a machine that has no Ascend. Compiled at first use (simulated_device.py).
//
// Groups are kept here because both sides make them: the front end for its layouts, Python for cells that name groups.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "include/utils/comm_manager.h"
#include "utils/ms_context.h"

namespace {

std::mutex mutex;
std::map<std::string, std::vector<unsigned>> groups;
unsigned world_size = 1;
unsigned world_rank = 0;

class SimulatedComm : public mindspore::CommManager {
 public:
  SimulatedComm() : CommManager("Ascend") {}

  bool CreateGroupSync(const std::string &name, const std::vector<unsigned> &ranks) const override {
    std::lock_guard<std::mutex> lock(mutex);
    groups[name] = ranks;
    return true;
  }

  bool DestroyGroup(const std::string &name) const override {
    std::lock_guard<std::mutex> lock(mutex);
    groups.erase(name);
    return true;
  }

  bool GetRankID(const std::string &name, unsigned *rank) const override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = groups.find(name);
    if (found == groups.end()) {
      *rank = world_rank;
      return true;
    }
    const auto &ranks = found->second;
    const auto place = std::find(ranks.begin(), ranks.end(), world_rank);
    *rank = place == ranks.end() ? 0u : static_cast<unsigned>(place - ranks.begin());
    return true;
  }

  bool GetRankSize(const std::string &name, unsigned *size) const override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = groups.find(name);
    *size = found == groups.end() ? world_size : static_cast<unsigned>(found->second.size());
    return true;
  }

  uint32_t GetRank() override { return world_rank; }
};

void no_init(mindspore::MsContext *) {}

}  // namespace

extern "C" {

void set_target(const char *target, unsigned size, unsigned rank) {
  world_size = size;
  world_rank = rank;
  mindspore::CommManager::Register(target, std::make_shared<SimulatedComm>());
  mindspore::MsContext::RegisterInitFunc(target, no_init);
  mindspore::MsContext::GetInstance()->SetDeviceTargetFromInner(target);
}

void add_group(const char *name, const unsigned *ranks, unsigned size) {
  std::lock_guard<std::mutex> lock(mutex);
  groups[name] = std::vector<unsigned>(ranks, ranks + size);
}

// Writes "name=rank,rank,...\n" for every group; returns the bytes needed.
int list_groups(char *buffer, int capacity) {
  std::lock_guard<std::mutex> lock(mutex);
  std::string text;
  for (const auto &[name, ranks] : groups) {
    text += name + "=";
    for (const unsigned rank : ranks) text += std::to_string(rank) + ",";
    text += "\n";
  }
  const int size = static_cast<int>(text.size());
  if (size < capacity) std::memcpy(buffer, text.c_str(), size + 1);
  return size + 1;
}
}
