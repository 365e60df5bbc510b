/* A JVM under pressure: large arrays, small objects and garbage, checked against
 * what they were computed from. Prints "ok" and waits for a line on stdin. */
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

public final class Heap {
    static long mix(long x) {
        x += 0x9e3779b97f4a7c15L;
        x = (x ^ (x >>> 30)) * 0xbf58476d1ce4e5b9L;
        x = (x ^ (x >>> 27)) * 0x94d049bb133111ebL;
        return x ^ (x >>> 31);
    }

    static long[] block(int number) {
        long[] words = new long[64 * 1024];
        for (int i = 0; i < words.length; i++) {
            words[i] = i % 8 == 0 ? mix(number * 65536L + i) : 42;
        }
        return words;
    }

    static void check(long[] words, int number) {
        for (int i = 0; i < words.length; i++) {
            if (words[i] != (i % 8 == 0 ? mix(number * 65536L + i) : 42)) {
                throw new AssertionError("block " + number + " is wrong at " + i);
            }
        }
    }

    static String text(int number, int version) {
        return "record " + number + " version " + version + " of a table that changes all the time";
    }

    public static void main(String[] arguments) throws Exception {
        int blocks = Integer.parseInt(arguments[0]);
        List<long[]> kept = new ArrayList<>();
        for (int n = 0; n < blocks; n++) {
            kept.add(block(n));
        }
        Map<Integer, String> table = new HashMap<>();
        int[] version = new int[150_000];
        for (int n = 0; n < version.length; n++) {
            table.put(n, text(n, 0));
        }
        for (int round = 1; round <= 2; round++) {
            for (int step = 0; step < 100_000; step++) {
                long random = mix(round * 1_000_000L + step);
                int n = (int) Long.remainderUnsigned(random, version.length);
                if (!table.get(n).equals(text(n, version[n]))) {
                    throw new AssertionError("record " + n + " is wrong");
                }
                version[n]++;
                table.put(n, text(n, version[n]));
            }
            for (int n = 0; n < blocks; n++) {
                check(kept.get(n), n);
                if (n % 3 == round) {
                    kept.set(n, block(n)); // garbage, and memory that moves
                }
            }
            System.gc();
        }
        for (int n = 0; n < blocks; n++) {
            check(kept.get(n), n);
        }
        for (int n = 0; n < version.length; n++) {
            if (!table.get(n).equals(text(n, version[n]))) {
                throw new AssertionError("record " + n + " is wrong at the end");
            }
        }
        System.out.println("ok");
        System.in.read();
    }
}
