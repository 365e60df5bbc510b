// A program with an index that it needs all the time and an archive that it seldom
// looks into: the index is pinned, the archive lives compressed.
//
//     c++ -std=c++17 -O2 -I include examples/placement/archive.cpp -o archive -ldl
//     strata run --dram 64MiB -- ./archive
//
// Runs the same without Strata: then all of it is in DRAM, and it says so.
#include "allocator.hpp"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <unordered_map>
#include <vector>

struct record {
    std::uint64_t key;
    char text[248];
};

using archive = std::vector<record, strata::allocator<record, STRATA_COMPRESSED>>;
// A map's buckets are one large block; its nodes are small, and on the heap.
using index = std::unordered_map<
    std::uint64_t, std::size_t, std::hash<std::uint64_t>, std::equal_to<std::uint64_t>,
    strata::allocator<std::pair<const std::uint64_t, std::size_t>, STRATA_DRAM>>;

static record make(std::uint64_t number)
{
    record made{number * 2654435761u, {}};
    std::snprintf(made.text, sizeof made.text, "record %llu of the archive",
                  static_cast<unsigned long long>(number));
    return made;
}

// Pages of the archive that are out of DRAM's ordinary use; -1: nobody knows.
static long stored(const archive &all)
{
    const auto where = strata::detail::function<decltype(strata_where)>("strata_where");
    const std::size_t bytes = all.size() * sizeof(record);
    std::vector<unsigned char> tiers(STRATA_PAGES(all.data(), bytes));
    if (!where || where(all.data(), bytes, tiers.data()) != 0)
        return -1;
    long count = 0;
    for (const unsigned char tier : tiers)
        count += tier == STRATA_COMPRESSED || tier == STRATA_STAGED || tier == STRATA_FILE;
    return count;
}

int main()
{
    const std::size_t count = 100000;
    archive all;
    index numbers;
    all.reserve(count);
    numbers.reserve(count);
    for (std::size_t number = 0; number < count; number++) {
        all.push_back(make(number));
        numbers.emplace(all.back().key, number);
    }
    const long pages = static_cast<long>(STRATA_PAGES(all.data(), count * sizeof(record)));
    for (int turn = 0; turn < 1500 && stored(all) >= 0 && stored(all) < pages * 9 / 10; turn++)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (stored(all) < 0)
        std::puts("no Strata here: everything is in DRAM");
    else
        std::printf("%ld of %ld pages of the archive are out of DRAM\n", stored(all), pages);
    for (std::size_t number = 0; number < count; number += 7) {
        const record wanted = make(number);
        const record &found = all[numbers.at(wanted.key)];
        if (found.key != wanted.key || __builtin_strcmp(found.text, wanted.text) != 0) {
            std::printf("record %zu is wrong\n", number);
            return EXIT_FAILURE;
        }
    }
    std::puts("all records are right");
    return EXIT_SUCCESS;
}
