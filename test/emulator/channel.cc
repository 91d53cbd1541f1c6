#include "test/emulator/channel.h"

namespace hoccl::emu {

namespace {

// What a context has of each kind where CUDA_DEVICE_MAX_CONNECTIONS is not set: 8 for kernels and
// for copies to peers, and 4 each way between device and host.
int channelsByDefault(Path kind) { return kind == Path::D2H || kind == Path::H2D ? 4 : 8; }

}  // namespace

ChannelSet::ChannelSet(int connections) {
  for (int kind = 0; kind < kPaths; ++kind)
    kinds_[kind].channels.resize(static_cast<std::size_t>(
        connections > 0 ? connections : channelsByDefault(static_cast<Path>(kind))));
}

Channel* ChannelSet::enter(Path kind, ChannelUse* use) {
  if (use->unfinished++ > 0) return use->channel;
  Kind& all = kinds_[static_cast<int>(kind)];
  if (use->channel == nullptr || use->channel->streams > 0) {
    const std::size_t count = all.channels.size();
    std::size_t best = all.next;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t candidate = (all.next + i) % count;
      if (all.channels[candidate].streams < all.channels[best].streams) best = candidate;
    }
    use->channel = &all.channels[best];
    all.next = (best + 1) % count;
  }
  ++use->channel->streams;
  return use->channel;
}

void ChannelSet::leave(ChannelUse* use) {
  if (--use->unfinished == 0) --use->channel->streams;
}

}  // namespace hoccl::emu
