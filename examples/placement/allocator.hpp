// A C++ allocator whose memory is in a tier: for containers that are large and
// seldom looked into (STRATA_COMPRESSED, STRATA_FILE), or must never wait
// (STRATA_DRAM).
//
//     std::vector<record, strata::allocator<record, STRATA_COMPRESSED>> archive;
//
// The functions are looked up by name, so a program with it runs anywhere: where
// nobody manages it, memory comes from operator new.
#ifndef STRATA_ALLOCATOR_HPP
#define STRATA_ALLOCATOR_HPP

#include "strata.h"

#include <cstddef>
#include <dlfcn.h>
#include <limits>
#include <new>

namespace strata {

namespace detail {

template <typename Function> Function *function(const char *name)
{
    return reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
}

// Below this a range is not worth a mapping of its own, and is never managed.
constexpr std::size_t least_bytes = 128 << 10;

// A larger one begins with where it is from: managed or not can change while a
// program runs. A page of its own keeps what follows aligned.
constexpr std::size_t header_bytes = 4096;
struct header {
    bool placed;
};

} // namespace detail

// The result of strata_alloc is kept in `result`, if somebody wants to know.
inline void *allocate(std::size_t bytes, int tier, int *result = nullptr)
{
    static const auto alloc = detail::function<decltype(strata_alloc)>("strata_alloc");
    int code = -38; // -ENOSYS
    if (bytes < detail::least_bytes) {
        if (result)
            *result = code;
        return ::operator new(bytes);
    }
    if (bytes > std::numeric_limits<std::size_t>::max() - detail::header_bytes)
        throw std::bad_alloc();
    const std::size_t whole = bytes + detail::header_bytes;
    void *block = nullptr;
    if (alloc)
        code = alloc(&block, whole, tier);
    if (result)
        *result = code;
    if (code != 0)
        block = ::operator new(whole, std::align_val_t(detail::header_bytes));
    new (block) detail::header{code == 0};
    return static_cast<char *>(block) + detail::header_bytes;
}

inline void deallocate(void *memory, std::size_t bytes)
{
    static const auto release = detail::function<decltype(strata_free)>("strata_free");
    if (bytes < detail::least_bytes) {
        ::operator delete(memory);
        return;
    }
    void *block = static_cast<char *>(memory) - detail::header_bytes;
    if (static_cast<detail::header *>(block)->placed)
        release(block, bytes + detail::header_bytes);
    else
        ::operator delete(block, std::align_val_t(detail::header_bytes));
}

template <typename T, int Tier> struct allocator {
    using value_type = T;
    template <typename U> struct rebind {
        using other = allocator<U, Tier>;
    };

    allocator() = default;
    template <typename U> allocator(const allocator<U, Tier> &) {}

    T *allocate(std::size_t count)
    {
        static_assert(alignof(T) <= alignof(std::max_align_t), "no stricter than new");
        if (count > std::numeric_limits<std::size_t>::max() / sizeof(T))
            throw std::bad_array_new_length();
        return static_cast<T *>(strata::allocate(count * sizeof(T), Tier));
    }
    void deallocate(T *memory, std::size_t count)
    {
        strata::deallocate(memory, count * sizeof(T));
    }
};

template <typename T, typename U, int Tier>
bool operator==(const allocator<T, Tier> &, const allocator<U, Tier> &)
{
    return true;
}
template <typename T, typename U, int Tier>
bool operator!=(const allocator<T, Tier> &, const allocator<U, Tier> &)
{
    return false;
}

} // namespace strata

#endif
