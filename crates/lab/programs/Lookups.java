/* A JVM to be measured: a map of records, looked up by a skewed distribution;
 * one of twenty lookups writes its record. Every record that is read is checked
 * against the checksum of what it must hold. Says the lines of src/walk.rs and
 * waits for a line on its input after each.
 *
 *   java Lookups RECORDS WARMUP_SECONDS SECONDS
 */
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;

public final class Lookups {
    static final int BODY_BYTES = 960;
    static final int LOOKUPS_PER_ROUND = 4096;
    static final double ZIPF_EXPONENT = 0.99;
    static final byte[][] NAMES = bytes(new String[] {
        "Amelia", "Benjamin", "Charlotte", "Dmitri", "Elena", "Farid", "Giulia", "Henrik",
        "Ingrid", "Jamal", "Katarzyna", "Liam", "Marisol", "Nikolai", "Olivia", "Priya"});
    static final byte[][] CITIES = bytes(new String[] {
        "Rotterdam", "Valencia", "Gothenburg", "Lyon", "Krakow", "Porto", "Leipzig", "Bologna",
        "Ghent", "Aarhus", "Tampere", "Graz", "Brno", "Thessaloniki", "Galway", "Tartu"});
    static final byte[][] GOODS = bytes(new String[] {
        "copper kettle", "walnut desk", "linen curtain", "desk lamp", "wool blanket",
        "garden shears", "ceramic bowl", "leather wallet", "travel mug", "cast iron pan",
        "oak shelf", "cotton towel", "paper lantern", "brass hook", "bamboo tray", "steel ruler"});
    static final byte[][] STATES = bytes(new String[] {
        "pending", "paid", "packed", "shipped", "delivered", "returned"});

    static final class Record {
        final long id;
        int version;
        final byte[] body = new byte[BODY_BYTES];

        Record(long id) {
            this.id = id;
        }
    }

    static long mix(long x) {
        x += 0x9e3779b97f4a7c15L;
        x = (x ^ (x >>> 30)) * 0xbf58476d1ce4e5b9L;
        x = (x ^ (x >>> 27)) * 0x94d049bb133111ebL;
        return x ^ (x >>> 31);
    }

    /** Draws of one record's contents. */
    static final class Draw {
        long state;

        Draw(long id, int version) {
            state = mix(mix(id) ^ version);
        }

        int below(int bound) {
            state = mix(state);
            return (int) Long.remainderUnsigned(state, bound);
        }

        byte[] of(byte[][] list) {
            return list[below(list.length)];
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.ISO_8859_1);
    }

    static byte[][] bytes(String[] list) {
        return Arrays.stream(list).map(Lookups::bytes).toArray(byte[][]::new);
    }

    /** Text put into an array as far as it has room; loading makes half a million. */
    static final class Text {
        final byte[] out;
        int length;

        Text(byte[] out) {
            this.out = out;
        }

        Text put(byte[] text) {
            int fits = Math.min(text.length, out.length - length);
            System.arraycopy(text, 0, out, length, fits);
            length += fits;
            return this;
        }

        Text put(long number, int digits) {
            int end = Math.min(length + digits, out.length);
            for (int i = length + digits - 1; i >= length; i--) {
                if (i < end) {
                    out[i] = (byte) ('0' + number % 10);
                }
                number /= 10;
            }
            length = end;
            return this;
        }
    }

    static final byte[] ID = bytes("{\"id\":");
    static final byte[] VERSION = bytes(",\"version\":");
    static final byte[] CUSTOMER = bytes(",\"customer\":\"");
    static final byte[] CITY = bytes("\",\"city\":\"");
    static final byte[] STATUS = bytes("\",\"status\":\"");
    static final byte[] ITEMS = bytes("\",\"items\":[");
    static final byte[] TITLE = bytes("{\"title\":\"");
    static final byte[] QUANTITY = bytes("\",\"quantity\":");
    static final byte[] PRICE = bytes(",\"unit_price\":");
    static final byte[] CODE = bytes(".50,\"discount\":0.00,\"code\":");
    static final byte[] NEXT = bytes("},");

    /** The body that a record has in a version: an order with as many lines as fit. */
    static void fill(byte[] body, long id, int version) {
        Draw draw = new Draw(id, version);
        Text text = new Text(body);
        text.put(ID).put(id, 7).put(VERSION).put(version, 4).put(CUSTOMER).put(draw.of(NAMES))
            .put(CITY).put(draw.of(CITIES)).put(STATUS).put(draw.of(STATES)).put(ITEMS);
        while (text.length < body.length) {
            text.put(TITLE).put(draw.of(GOODS)).put(QUANTITY).put(1 + draw.below(4), 1)
                .put(PRICE).put(1 + draw.below(99), 2).put(CODE).put(draw.below(1_000_000), 6)
                .put(NEXT);
        }
    }

    static int checksum(byte[] body) {
        int sum = 1;
        for (byte value : body) {
            sum = 31 * sum + value;
        }
        return sum;
    }

    /** Ranks by Zipf's law (inversion: Gray et al., SIGMOD 1994), scattered by hashing. */
    static final class Keys {
        final int count;
        final double zeta;
        final double alpha = 1 / (1 - ZIPF_EXPONENT);
        final double eta;
        long state = 42;

        Keys(int count) {
            this.count = count;
            double sum = 0;
            for (int rank = 1; rank <= count; rank++) {
                sum += Math.pow(rank, -ZIPF_EXPONENT);
            }
            zeta = sum;
            double two = 1 + Math.pow(2, -ZIPF_EXPONENT);
            eta = (1 - Math.pow(2.0 / count, 1 - ZIPF_EXPONENT)) / (1 - two / zeta);
        }

        long next() {
            state++;
            return mix(state);
        }

        int draw() {
            double uniform = (next() >>> 11) * 0x1.0p-53;
            double scaled = uniform * zeta;
            long rank;
            if (scaled < 1) {
                rank = 0;
            } else if (scaled < 1 + Math.pow(0.5, ZIPF_EXPONENT)) {
                rank = 1;
            } else {
                rank = (long) (count * Math.pow(eta * uniform - eta + 1, alpha));
            }
            return (int) Long.remainderUnsigned(mix(rank), count);
        }
    }

    /** Powers of two in eighths: what a latency is counted in. */
    static int bucket(long ns) {
        int power = 63 - Long.numberOfLeadingZeros(Math.max(ns, 8));
        return power * 8 + (int) ((ns >>> (power - 3)) & 7);
    }

    static double quantileUs(long[] counts, double quantile) {
        long total = 0;
        for (long count : counts) {
            total += count;
        }
        long seen = 0;
        for (int i = 0; i < counts.length; i++) {
            seen += counts[i];
            if (total > 0 && seen >= total * quantile) {
                return (8 + i % 8 + 0.5) * Math.pow(2, i / 8 - 3) / 1000;
            }
        }
        return 0;
    }

    final Map<Long, Record> table;
    /** What each record's body must have: kept apart, so that it stays in place. */
    final int[] expected;
    final Keys keys;
    final StringBuilder rounds = new StringBuilder();
    long[] latencies = new long[64 * 8];
    long chain;

    Lookups(int count) {
        table = new HashMap<>(count * 2);
        expected = new int[count];
        for (int id = 0; id < count; id++) {
            Record record = new Record(id);
            fill(record.body, id, 0);
            expected[id] = checksum(record.body);
            table.put((long) id, record);
        }
        keys = new Keys(count);
    }

    void check(Record record, int id) {
        if (record == null || record.id != id || checksum(record.body) != expected[id]) {
            throw new AssertionError("record " + id + " is not what was written");
        }
    }

    void round() {
        for (int i = 0; i < LOOKUPS_PER_ROUND; i++) {
            int id = keys.draw();
            boolean writes = keys.next() % 20 == 0;
            long begin = System.nanoTime();
            Record record = table.get((long) id);
            check(record, id);
            if (writes) {
                record.version++;
                fill(record.body, id, record.version);
                expected[id] = checksum(record.body);
            }
            latencies[bucket(System.nanoTime() - begin)]++;
            chain = mix(chain ^ expected[id]);
        }
        rounds.append(rounds.length() == 0 ? "\"" : ",\"").append(Long.toHexString(chain)).append('"');
    }

    /** Rounds done. */
    long rounds(double seconds) {
        long until = System.nanoTime() + (long) (seconds * 1e9);
        long done = 0;
        while (System.nanoTime() < until) {
            round();
            done++;
        }
        return done;
    }

    static final BufferedReader input = new BufferedReader(new InputStreamReader(System.in));

    static void pass(String line) throws IOException {
        System.out.println(line);
        System.out.flush();
        input.readLine();
    }

    public static void main(String[] arguments) throws IOException {
        int count = Integer.parseInt(arguments[0]);
        Lookups lookups = new Lookups(count);
        pass("{\"gate\":\"loaded\",\"bytes\":" + (long) count * BODY_BYTES + "}");
        lookups.rounds(Double.parseDouble(arguments[1]));
        pass("{\"gate\":\"warm\"}");
        lookups.latencies = new long[lookups.latencies.length];
        long begin = System.nanoTime();
        long operations = lookups.rounds(Double.parseDouble(arguments[2])) * LOOKUPS_PER_ROUND;
        double seconds = (System.nanoTime() - begin) / 1e9;
        pass(String.format(Locale.ROOT,
            "{\"gate\":\"done\",\"operations\":%d,\"seconds\":%f,\"p50_us\":%f,\"p99_us\":%f,"
                + "\"rounds\":[%s]}",
            operations, seconds, quantileUs(lookups.latencies, 0.5),
            quantileUs(lookups.latencies, 0.99), lookups.rounds));
        byte[] body = new byte[BODY_BYTES];
        for (int id = 0; id < count; id++) {
            Record record = lookups.table.get((long) id);
            lookups.check(record, id);
            fill(body, id, record.version);
            if (checksum(body) != lookups.expected[id]) {
                throw new AssertionError("record " + id + " is not what its version says");
            }
        }
        pass("{\"gate\":\"verified\",\"values\":" + count + "}");
    }
}
