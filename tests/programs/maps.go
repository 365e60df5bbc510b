// A Go program under pressure: maps, slices and garbage, several goroutines, a
// concurrent collector. Linked dynamically (it uses cgo), because a static
// program cannot be entered. Prints "ok" and waits for a line on stdin.
package main

// int answer(void) { return 42; }
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"sync"
)

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

func text(number, version int) string {
	return fmt.Sprintf("record %d version %d of a table that is changed all the time", number, version)
}

func block(number uint64) []uint64 {
	words := make([]uint64, 4096)
	for i := range words {
		words[i] = 42
		if i%8 == 0 {
			words[i] = mix(number<<32 + uint64(i))
		}
	}
	return words
}

func work(worker int, wait *sync.WaitGroup) {
	defer wait.Done()
	const records, blocks = 50_000, 700
	table := map[int]string{}
	version := map[int]int{}
	kept := make([][]uint64, blocks)
	for n := range kept {
		kept[n] = block(uint64(worker*blocks + n))
	}
	for n := 0; n < records; n++ {
		table[n] = text(n, 0)
	}
	for step := 0; step < 60_000; step++ {
		n := int(mix(uint64(worker)<<40+uint64(step)) % records)
		if table[n] != text(n, version[n]) {
			panic(fmt.Sprintf("record %d is wrong", n))
		}
		version[n]++
		table[n] = text(n, version[n])
		if step%20 == 0 {
			b := step / 20 % blocks
			for i, word := range kept[b] {
				if i%8 == 0 && word != mix(uint64(worker*blocks+b)<<32+uint64(i)) || i%8 != 0 && word != 42 {
					panic(fmt.Sprintf("block %d is wrong at %d", b, i))
				}
			}
			kept[b] = block(uint64(worker*blocks + b))
		}
	}
	for n := 0; n < records; n++ {
		if table[n] != text(n, version[n]) {
			panic(fmt.Sprintf("record %d is wrong at the end", n))
		}
	}
}

func main() {
	if C.answer() != 42 {
		panic("cgo")
	}
	var wait sync.WaitGroup
	for worker := 0; worker < 4; worker++ {
		wait.Add(1)
		go work(worker, &wait)
	}
	wait.Wait()
	runtime.GC()
	fmt.Println("ok")
	os.Stdin.Read(make([]byte, 1))
}
