// A multi-threaded C++ program that a snapshot is taken of while it works: a map
// that threads change under a lock, strings, shared pointers, futures, and
// exceptions that unwind through several frames in every round.
//
//   moments BOARD MODE SIZE_MIB
//
// The board is that of moment.c. What is wrong is said on stderr, status 1.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

struct Board {
    std::atomic<uint32_t> epoch, reports;
    std::atomic<uint64_t> count, resumed_at;
    std::atomic<uint32_t> order, done, ready;
};

constexpr unsigned threads = 4;
constexpr size_t value_bytes = 2000;

// About `value_bytes` of text that follow from a key and a version.
std::string text(uint64_t key, uint64_t version) {
    std::string made;
    made.reserve(value_bytes + 40);
    for (uint64_t word = key * 31 + version; made.size() < value_bytes; word = word * 7 + 3)
        made += "item " + std::to_string(word % 100000) + "; ";
    return made;
}

struct Value {
    uint64_t version = 0;
    std::shared_ptr<const std::string> body;
};

// One for each thread, so that what a thread finds is only its own doing.
struct Shelf {
    std::mutex lock;
    std::map<uint64_t, Value> values;
    uint64_t thrown = 0, caught = 0;
};

std::vector<Shelf> shelves(threads);
std::atomic<uint64_t> keys;

void check(uint64_t key, const Value &value) {
    if (*value.body != text(key, value.version))
        throw std::logic_error("value " + std::to_string(key) + " is wrong");
}

struct Unlucky : std::runtime_error {
    explicit Unlucky(uint64_t key) : std::runtime_error(text(key, 1)), key(key) {}
    uint64_t key;
};

// Throws from `depth` frames down, each with something to destroy.
uint64_t dig(Shelf &shelf, uint64_t key, int depth) {
    std::vector<uint64_t> destroyed(64, key);
    if (depth == 0) {
        shelf.thrown++;
        throw Unlucky(key);
    }
    return dig(shelf, key, depth - 1) + destroyed[5];
}

void round(Shelf &shelf, std::mt19937_64 &chance) {
    uint64_t key = chance() % keys;
    std::lock_guard hold(shelf.lock);
    Value &value = shelf.values.at(key);
    check(key, value);
    value = {value.version + 1, std::make_shared<const std::string>(text(key, value.version + 1))};
    try {
        dig(shelf, key, 20);
    } catch (const Unlucky &unlucky) {
        if (unlucky.key != key || unlucky.what() != text(key, 1))
            throw std::logic_error("another exception was caught than was thrown");
        shelf.caught++;
    }
}

void check_all() {
    std::vector<std::future<void>> checks;
    for (Shelf &shelf : shelves)
        checks.push_back(std::async(std::launch::async, [&shelf] {
            std::lock_guard hold(shelf.lock);
            if (shelf.thrown != shelf.caught || shelf.values.size() != keys)
                throw std::logic_error("thrown and caught differ, or keys are lost");
            for (const auto &[key, value] : shelf.values)
                check(key, value);
        }));
    for (auto &one : checks)
        one.get();
}

// What is thrown ends the program with a word on stderr.
template <typename Body> void guarded(Body body) {
    try {
        body();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(1);
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int file = open(argv[1], O_RDWR | O_CLOEXEC);
    void *mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || mapped == MAP_FAILED)
        return 2;
    close(file);
    auto &board = *static_cast<Board *>(mapped);
    keys = std::strtoull(argv[3], nullptr, 10) * (1 << 20) / (value_bytes + 200) / threads;
    for (Shelf &shelf : shelves)
        for (uint64_t key = 0; key < keys; key++)
            shelf.values[key] = {0, std::make_shared<const std::string>(text(key, 0))};
    for (unsigned thread = 0; thread < threads; thread++)
        std::thread([thread] {
            guarded([thread] {
                for (std::mt19937_64 chance(thread);;)
                    round(shelves[thread], chance);
            });
        }).detach();
    board.ready = 1;
    guarded([&board] {
        uint32_t epoch = 0, last = 0;
        for (uint64_t count = 0;;) {
            if (uint32_t now = board.epoch; now != epoch) {
                epoch = now;
                board.resumed_at = count;
                board.reports++;
            }
            board.count = ++count;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
            uint32_t order = board.order;
            if ((order & 255) == 0 || order == last)
                continue;
            last = order;
            check_all();
            board.done = order;
        }
    });
}
