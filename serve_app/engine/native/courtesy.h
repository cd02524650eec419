// A core for those who carry the last step's tokens.
//
// While a step begins, other processes still take the last one's tokens to their readers. On two cores each of them pushes
// one of our two threads aside, and the other thread then waits for it at the end of every product: what they take is lost
// twice. So as long as somebody else wants a core the second thread stays out, and the first goes on alone.

#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>

namespace {

// Whether a team of so many threads has every core of the machine, and these are two. Elsewhere there may be another free
// core, and in a container on a larger machine what `others_want_a_core` counts is not ours.
inline bool fills_two_cores(int num_threads) {
    static const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return num_threads == 2 && cores == 2;
}

// Whether anything on this machine, besides the thread that asks, runs or could; false where the system does not say.
inline bool others_want_a_core() {
    static const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    char text[64] = {};  // "0.10 0.09 0.08 2/345 6789": the 2 is what we want
    if (pread(file, text, sizeof text - 1, 0) <= 0) return false;
    const char* at = text;
    for (int spaces = 0; spaces < 3 && *at; ++at) spaces += *at == ' ';
    return std::strtol(at, nullptr, 10) > 1;
}

// Where the second thread of a team waits, off its core, until it is let in.
class Gate {
   public:
    void let_in() {
        const std::lock_guard<std::mutex> held(lock);
        is_open = true;
        opened.notify_one();
    }
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        opened.wait(held, [&] { return is_open; });
    }

   private:
    std::mutex lock;
    std::condition_variable opened;
    bool is_open = false;
};

}  // namespace
