//! Plain tables for the terminal and for Markdown. Pure.

/// Rows of cells under a header; the first column is text, the others numbers.
#[derive(Clone, Default, Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(|&cell| cell.to_owned()).collect(), rows: Vec::new() }
    }

    /// A row with fewer cells than the header is filled up; one with more is
    /// our bug.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        assert!(cells.len() <= self.header.len(), "more cells than columns: {cells:?}");
        self.rows.push(cells);
    }

    fn widths(&self) -> Vec<usize> {
        (0..self.header.len())
            .map(|column| {
                self.rows
                    .iter()
                    .chain([&self.header])
                    .filter_map(|row| row.get(column))
                    .map(|cell| cell.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect()
    }

    fn line(&self, row: &[String], widths: &[usize], between: &str) -> String {
        widths
            .iter()
            .enumerate()
            .map(|(column, &width)| {
                let cell = row.get(column).map_or("", String::as_str);
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            })
            .collect::<Vec<_>>()
            .join(between)
    }

    /// For the terminal.
    pub(crate) fn plain(&self) -> String {
        let widths = self.widths();
        let mut out = format!("  {}\n", self.line(&self.header, &widths, "  ").trim_end());
        let rule: usize = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        out.push_str(&format!("  {}\n", "─".repeat(rule)));
        for row in &self.rows {
            out.push_str(&format!("  {}\n", self.line(row, &widths, "  ").trim_end()));
        }
        out
    }

    pub(crate) fn markdown(&self) -> String {
        let widths = self.widths();
        let rule: Vec<String> = widths
            .iter()
            .enumerate()
            .map(|(column, &width)| {
                let dashes = "-".repeat(width.max(3) - usize::from(column > 0));
                if column == 0 { dashes } else { format!("{dashes}:") }
            })
            .collect();
        let mut out = format!("| {} |\n", self.line(&self.header, &widths, " | "));
        out.push_str(&format!("| {} |\n", rule.join(" | ")));
        for row in &self.rows {
            out.push_str(&format!("| {} |\n", self.line(row, &widths, " | ")));
        }
        out
    }
}

/// `123456` → `123k`, `1234` → `1.23k`: three digits say enough.
pub(crate) fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    format!("{}{unit}", three_digits(scaled))
}

/// Three significant digits, no exponent.
pub(crate) fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Mebibytes, whole.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let mut table = Table::new(&["setup", "ops/s", "µs"]);
        table.row(vec!["DRAM".into(), "300k".into(), "3.3".into()]);
        table.row(vec!["zram 33 %".into(), "61k".into()]);
        table
    }

    #[test]
    fn plain_columns_line_up() {
        let expected = "  setup      ops/s   µs\n  ─────────────────────\n  \
                        DRAM        300k  3.3\n  zram 33 %    61k\n";
        assert_eq!(sample().plain(), expected);
    }

    #[test]
    fn markdown_is_a_table() {
        let text = sample().markdown();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("| setup     | ops/s |  µs |"));
        assert_eq!(lines.next(), Some("| --------- | ----: | --: |"));
        assert!(text.lines().all(|line| line.matches('|').count() == 4));
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (299_812.0, "300k"),
            (61_234.0, "61.2k"),
            (12.34, "12.3"),
            (3.317, "3.32"),
            (0.0, "0.00"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
