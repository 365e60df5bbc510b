//! What sysbench says when it is done.

/// Of its report.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Report {
    pub transactions: u64,
    pub seconds: f64,
    /// Of the percentile that it was asked for.
    pub percentile_ms: f64,
}

/// Reads it; None: it is not complete.
pub(crate) fn read(text: &str) -> Option<Report> {
    let after =
        |name: &str| text.lines().find_map(|line| Some(line.split_once(name)?.1)).map(str::trim);
    Some(Report {
        transactions: after("transactions:")?.split_whitespace().next()?.parse().ok()?,
        seconds: after("total time:")?.strip_suffix('s')?.parse().ok()?,
        percentile_ms: after("th percentile:")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysbenchs_report_is_read() {
        let text = "    transactions:                        2163   (720.06 per sec.)\n\
                    \x20   total time:                          3.0027s\n\
                    \x20        99th percentile:                       25.28\n";
        let wanted = Report { transactions: 2163, seconds: 3.0027, percentile_ms: 25.28 };
        assert_eq!(read(text), Some(wanted));
        assert_eq!(read("transactions: 5"), None);
    }
}
