//! The demo's picture: an SVG that needs nothing else, and a page around it.
//! Pure: a report in, text out.

use crate::{
    demo::{Phase, Report, table},
    drawing::{Drawing, colour, escape},
    table::{mebibytes, short, three_digits},
};
use std::fmt::Write;

const WIDTH: f64 = 1240.0;
const MARGIN: f64 = 40.0;
/// Where the bars begin: the labels stand before.
const BARS_LEFT: f64 = 250.0;
const ROW_HEIGHT: f64 = 46.0;
const BARS_TOP: f64 = 150.0;
const TIMELINE_HEIGHT: f64 = 190.0;

/// The parts of a phase's bar (value, opacity) and its caption.
type Bar = (Vec<(f64, f64)>, String);

/// One column of bars.
struct Panel {
    title: &'static str,
    note: &'static str,
    left: f64,
    width: f64,
    parts: fn(&Phase) -> Bar,
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "Throughput",
        note: "operations per second",
        left: BARS_LEFT,
        width: 230.0,
        parts: |phase| {
            let rate = phase.result.run.operations_per_second;
            (vec![(rate, 1.0)], short(rate))
        },
    },
    Panel {
        title: "DRAM",
        note: "resident + compressed + metadata, MiB",
        left: BARS_LEFT + 255.0,
        width: 270.0,
        parts: |phase| {
            let memory = &phase.result.memory;
            let parts = vec![
                (memory.resident_bytes as f64, 1.0),
                (memory.compressed_bytes as f64, 0.55),
                (memory.metadata_bytes as f64, 0.3),
            ];
            (parts, mebibytes(memory.total_bytes()))
        },
    },
    Panel {
        title: "Server CPU",
        note: "µs per operation, daemon included",
        left: BARS_LEFT + 550.0,
        width: 190.0,
        parts: |phase| {
            let result = &phase.result;
            let own = result.server_cpu_us_per_op - result.daemon_cpu_us_per_op;
            let parts = vec![(own, 1.0), (result.daemon_cpu_us_per_op, 0.55)];
            (parts, three_digits(result.server_cpu_us_per_op))
        },
    },
    Panel {
        title: "Latency",
        note: "p50 (dark) and p99, ms",
        left: BARS_LEFT + 765.0,
        width: 185.0,
        parts: |phase| {
            let run = &phase.result.run;
            let parts = vec![(run.p50_us, 1.0), (run.p99_us - run.p50_us, 0.35)];
            let caption = format!(
                "{} / {}",
                three_digits(run.p50_us / 1000.0),
                three_digits(run.p99_us / 1000.0)
            );
            (parts, caption)
        },
    },
];

/// Room that a panel keeps behind its longest bar for the caption.
const CAPTION_WIDTH: f64 = 78.0;

/// The picture.
pub(crate) fn draw(report: &Report) -> String {
    let rows = report.phases.len() as f64;
    let timeline_top = BARS_TOP + rows * ROW_HEIGHT + 90.0;
    let footer_top = timeline_top + TIMELINE_HEIGHT + 60.0;
    let height = footer_top + 24.0 * (1.0 + report.notes.len() as f64) + 10.0;
    let mut drawing = Drawing::new(WIDTH, height);
    drawing.text(MARGIN, 52.0, "h", "One Redis, one load, less and less DRAM");
    drawing.text(MARGIN, 78.0, "s", &report.workload);
    bars(&mut drawing, report);
    timeline(&mut drawing, report, timeline_top);
    drawing.text(MARGIN, footer_top, "n", &report.provenance.line());
    for (line, note) in report.notes.iter().enumerate() {
        let y = footer_top + 22.0 * (line + 1) as f64;
        drawing.text(MARGIN, y, "n", note);
    }
    drawing.finish()
}

/// What the longest bar of a panel stands for: the largest value, unless that
/// would make all others too short to see.
fn longest_bar(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let largest = sorted.first().copied().unwrap_or(0.0);
    let second = sorted.get(1).copied().unwrap_or(largest);
    largest.min(3.0 * second).max(f64::MIN_POSITIVE)
}

fn bars(drawing: &mut Drawing, report: &Report) {
    for (row, phase) in report.phases.iter().enumerate() {
        let y = BARS_TOP + row as f64 * ROW_HEIGHT;
        if row % 2 == 0 {
            drawing.put(&format!(
                "<rect x=\"{}\" y=\"{y:.1}\" width=\"{}\" height=\"{ROW_HEIGHT}\" rx=\"6\" \
                 fill=\"#f8fafc\"/>",
                MARGIN - 12.0,
                WIDTH - 2.0 * MARGIN + 24.0
            ));
        }
        drawing.text(MARGIN, y + 20.0, "l", &phase.label);
        drawing.text(MARGIN, y + 36.0, "n", &phase.detail);
    }
    for panel in &PANELS {
        drawing.text(panel.left, BARS_TOP - 32.0, "t", panel.title);
        drawing.text(panel.left, BARS_TOP - 14.0, "n", panel.note);
        let sum = |phase: &Phase| (panel.parts)(phase).0.iter().map(|part| part.0).sum::<f64>();
        let sums: Vec<f64> = report.phases.iter().map(sum).collect();
        let longest = longest_bar(&sums);
        let scale = (panel.width - CAPTION_WIDTH) / longest;
        for (row, phase) in report.phases.iter().enumerate() {
            let y = BARS_TOP + row as f64 * ROW_HEIGHT + 11.0;
            let (parts, caption) = (panel.parts)(phase);
            let mut x = panel.left;
            let mut room = longest;
            for (value, opacity) in parts {
                let width = value.clamp(0.0, room) * scale;
                room -= value.clamp(0.0, room);
                drawing.put(&format!(
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"24\" \
                     fill=\"{}\" fill-opacity=\"{opacity}\"/>",
                    colour(phase.result.setup)
                ));
                x += width;
            }
            if sums[row] > longest {
                // Torn off: the bar goes on beyond the panel.
                drawing.put(&format!(
                    "<path d=\"M{:.1} {:.1} l8 -28 h5 l-8 28 z\" fill=\"#ffffff\"/>",
                    x - 22.0,
                    y + 26.0
                ));
            }
            drawing.text(x + 7.0, y + 17.0, "v", &caption);
        }
    }
}

/// Opacity of a line: the first of a kind is dark, the later ones lighter.
fn shade(report: &Report, row: usize) -> f64 {
    let kind = colour(report.phases[row].result.setup);
    let before =
        report.phases[..row].iter().filter(|phase| colour(phase.result.setup) == kind).count();
    (1.0 - 0.3 * before as f64).max(0.4)
}

fn timeline(drawing: &mut Drawing, report: &Report, top: f64) {
    let lines: Vec<&Vec<(f64, f64)>> =
        report.phases.iter().map(|phase| &phase.result.run.timeline).collect();
    let points = || lines.iter().flat_map(|line| line.iter());
    let seconds = points().map(|point| point.0).fold(1.0, f64::max);
    let largest = points().map(|point| point.1).fold(1.0, f64::max);
    let right = WIDTH - MARGIN - 150.0;
    drawing.text(MARGIN, top - 32.0, "t", "Throughput over time");
    drawing.text(
        MARGIN,
        top - 14.0,
        "n",
        "thousand operations per second, warm-up included; each line begins when the load begins",
    );
    let left = MARGIN + 46.0;
    let x_of = |at: f64| left + at / seconds * (right - left);
    let y_of = |rate: f64| top + TIMELINE_HEIGHT * (1.0 - rate / largest);
    for quarter in 0..=4 {
        let rate = largest * f64::from(quarter) / 4.0;
        let y = y_of(rate);
        drawing.put(&format!(
            "<line x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\" stroke=\"#e2e8f0\"/>"
        ));
        drawing.text(left - 8.0, y + 4.0, "n e", &format!("{:.0}", rate / 1000.0));
    }
    let mut second = 0.0;
    while second <= seconds {
        drawing.text(
            x_of(second) - 4.0,
            top + TIMELINE_HEIGHT + 18.0,
            "n",
            &format!("{second:.0} s"),
        );
        second += 2.0;
    }
    let mut label_bottom = f64::MIN;
    let mut order: Vec<usize> = (0..lines.len()).filter(|&row| !lines[row].is_empty()).collect();
    let last = |row: usize| lines[row].last().map_or(0.0, |point| point.1);
    order.sort_by(|&a, &b| last(b).total_cmp(&last(a)));
    for row in order {
        let phase = &report.phases[row];
        let mut path = String::new();
        for (at, rate) in lines[row] {
            write!(path, "{:.1},{:.1} ", x_of(*at), y_of(*rate)).expect("a String takes all");
        }
        drawing.put(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-opacity=\"{:.2}\" \
             stroke-width=\"2.2\" stroke-linejoin=\"round\"/>",
            path.trim_end(),
            colour(phase.result.setup),
            shade(report, row)
        ));
        // Lines may end close to each other; their names may not.
        let y = (y_of(last(row)) + 4.0).max(label_bottom + 15.0);
        label_bottom = y;
        drawing.text(right + 10.0, y, "n", &phase.label);
    }
}

/// A page with the picture and the table, for a browser.
pub(crate) fn page(report: &Report, drawing: &str) -> String {
    let mut rows = String::new();
    let text = table(&report.phases).plain();
    rows.push_str(&escape(&text));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>Strata demo</title>\n<style>body{{margin:2rem auto;max-width:1240px;\
         font-family:Inter,'Segoe UI',sans-serif;background:#f1f5f9;color:#0f172a}}\
         figure{{margin:0;background:#fff;border-radius:12px;box-shadow:0 1px 4px #0002;\
         overflow:hidden}}svg{{width:100%;height:auto;display:block}}\
         pre{{background:#fff;border-radius:12px;padding:1rem 1.5rem;overflow-x:auto;\
         box-shadow:0 1px 4px #0002;font-size:13px}}</style></head>\n<body>\n\
         <figure>{drawing}</figure>\n<pre>{rows}</pre>\n\
         <p>Every figure was measured in this run; every value was compared with what had been \
         written. Command: <code>{}</code></p>\n</body></html>\n",
        escape(&report.provenance.command.join(" "))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_outlier_does_not_hide_the_others() {
        assert_eq!(longest_bar(&[1.0, 900.0, 10.0]), 30.0);
        assert_eq!(longest_bar(&[1.0, 12.0, 10.0]), 12.0);
        assert_eq!(longest_bar(&[5.0]), 5.0);
        assert!(longest_bar(&[0.0, 0.0]) > 0.0);
    }

    #[test]
    fn panels_lie_side_by_side_inside_the_picture() {
        for pair in PANELS.windows(2) {
            assert!(pair[0].left + pair[0].width <= pair[1].left, "{}", pair[0].title);
        }
        let last = &PANELS[PANELS.len() - 1];
        assert!(last.left + last.width <= WIDTH - MARGIN / 2.0);
    }
}
