#include "test/conformance/registering_net.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "test/conformance/processes.h"

namespace conformance {
namespace {

class RegisteringNet final : public Net {
 public:
  explicit RegisteringNet(std::unique_ptr<Net> net) : net_(std::move(net)) {}
  [[nodiscard]] int version() const override { return net_->version(); }
  [[nodiscard]] const char* name() const override { return net_->name(); }
  ncclResult_t init(void** context, hoccl::nccl_abi::Logger logger) override {
    return net_->init(context, logger);
  }
  ncclResult_t devices(int* count) override { return net_->devices(count); }
  ncclResult_t properties(int device, Properties* out) override {
    return net_->properties(device, out);
  }
  ncclResult_t makeVirtual(int count, const int* devices, int* out) override {
    return net_->makeVirtual(count, devices, out);
  }
  ncclResult_t listen(void* context, int device, void* handle, void** out) override {
    return net_->listen(context, device, handle, out);
  }
  ncclResult_t connect(void* context, int device, void* handle, void** out) override {
    return net_->connect(context, device, handle, out);
  }
  ncclResult_t accept(void* listener, void** out) override { return net_->accept(listener, out); }
  ncclResult_t registerMemory(void* comm, void* data, std::size_t bytes, int type,
                              void** handle) override {
    return net_->registerMemory(comm, data, bytes, type, handle);
  }
  ncclResult_t deregisterMemory(void* comm, void* handle) override {
    return net_->deregisterMemory(comm, handle);
  }
  ncclResult_t send(void* comm, const void* data, std::size_t bytes, int tag, void** request,
                    void* handle) override {
    Kept kept(*this, comm);
    if (handle == nullptr) handle = kept.add(const_cast<void*>(data), bytes);
    const ncclResult_t result = net_->send(comm, data, bytes, tag, request, handle);
    if (result == ncclSuccess && *request != nullptr) kept.keepFor(*request);
    return result;
  }
  ncclResult_t receive(void* comm, int count, void** data, const std::size_t* bytes,
                       const int* tags, void** request, void* const* handles) override {
    constexpr int kMost = hoccl::nccl_abi::kMaxGroupedReceives;
    Kept kept(*this, comm);
    void* given[kMost] = {};
    for (int i = 0; i < count && i < kMost; ++i) {
      given[i] = handles != nullptr ? handles[i] : nullptr;
      if (given[i] == nullptr) given[i] = kept.add(data[i], bytes[i]);
    }
    const ncclResult_t result = net_->receive(comm, count, data, bytes, tags, request, given);
    if (result == ncclSuccess && *request != nullptr) kept.keepFor(*request);
    return result;
  }
  ncclResult_t flush(void* comm, void* data, int bytes, void** request, void* handle) override {
    return net_->flush(comm, data, bytes, request, handle);
  }
  ncclResult_t test(void* request, int* done, int* sizes) override {
    const ncclResult_t result = net_->test(request, done, sizes);
    if (result == ncclSuccess && *done == 0) return result;
    Registered over;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = requests_.find(request);
      if (found == requests_.end()) return result;
      over = std::move(found->second);
      requests_.erase(found);
    }
    // Of a failed one, too: nothing is written there any more.
    for (void* handle : over.handles) REQUIRE_OK(net_->deregisterMemory(over.comm, handle));
    return result;
  }
  ncclResult_t closeSend(void* comm) override { return net_->closeSend(comm); }
  ncclResult_t closeReceive(void* comm) override { return net_->closeReceive(comm); }
  ncclResult_t closeListen(void* comm) override { return net_->closeListen(comm); }
  [[nodiscard]] std::string missing() const override { return net_->missing(); }
  ncclResult_t finalize(void* context) override { return net_->finalize(context); }

 private:
  struct Registered {
    void* comm = nullptr;
    std::vector<void*> handles;
  };
  /// What one call registers: given back with it, or kept for its request.
  class Kept {
   public:
    Kept(RegisteringNet& its, void* comm) : its_(its) { registered_.comm = comm; }
    ~Kept() {
      for (void* handle : registered_.handles) {
        REQUIRE_OK(its_.net_->deregisterMemory(registered_.comm, handle));
      }
    }
    void* add(void* data, std::size_t bytes) {
      void* handle = nullptr;
      if (data == nullptr || bytes == 0) return nullptr;
      REQUIRE_OK(its_.net_->registerMemory(registered_.comm, data, bytes,
                                           hoccl::nccl_abi::kHostPointer, &handle));
      if (handle != nullptr) registered_.handles.push_back(handle);
      return handle;
    }
    void keepFor(void* request) {
      const std::lock_guard<std::mutex> lock(its_.mutex_);
      its_.requests_[request] = std::exchange(registered_, {});
    }

   private:
    RegisteringNet& its_;
    Registered registered_;
  };

  std::unique_ptr<Net> net_;
  std::mutex mutex_;
  std::map<void*, Registered> requests_;
};

}  // namespace

std::unique_ptr<Net> registering(std::unique_ptr<Net> net) {
  return std::make_unique<RegisteringNet>(std::move(net));
}

}  // namespace conformance
