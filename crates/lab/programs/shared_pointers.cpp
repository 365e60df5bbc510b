// Bench: copies shared pointers in a program with one thread, where their counts
// need not be atomic. Prints the seconds that it took.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

int main(int count, char **arguments) {
    long rounds = count > 1 ? std::atol(arguments[1]) : 10000, sum = 0;
    std::vector<std::shared_ptr<int>> pointers;
    for (int i = 0; i < 1000; i++) pointers.push_back(std::make_shared<int>(i));
    auto begin = std::chrono::steady_clock::now();
    for (long round = 0; round < rounds; round++)
        for (auto pointer : pointers) sum += *pointer;
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("%.6f\n", seconds.count());
    return sum == 0;
}
