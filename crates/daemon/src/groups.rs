//! Who shares a dedup domain: tenants of one group keep equal pages that they have evicted
//! once. The configuration says who trusts whom; a tenant is of the group that its name was
//! in when it was made, for as long as it is there.

use crate::config::User;

/// Some tenants of one user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Members {
    /// Whose.
    pub(crate) user: User,
    /// A name, or how names begin.
    pub(crate) name: String,
    /// It is how names begin.
    pub(crate) is_beginning: bool,
}

impl Members {
    fn have(&self, uid: u32, name: &str) -> bool {
        let is_it =
            if self.is_beginning { name.starts_with(&self.name) } else { name == self.name };
        self.user.uid == uid && is_it
    }

    /// Whether a tenant can be of both.
    fn overlap(&self, other: &Self) -> bool {
        self.have(other.user.uid, &other.name)
            || other.have(self.user.uid, &self.name)
            || (self.is_beginning
                && other.is_beginning
                && self.user.uid == other.user.uid
                && (self.name.starts_with(&other.name) || other.name.starts_with(&self.name)))
    }
}

/// A group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) members: Vec<Members>,
}

/// The group of a tenant, if it has one.
pub(crate) fn of<'a>(groups: &'a [Group], uid: u32, name: &str) -> Option<&'a str> {
    let has = |group: &&Group| group.members.iter().any(|members| members.have(uid, name));
    groups.iter().find(has).map(|group| group.name.as_str())
}

/// A group before this one that a tenant could be of as well.
pub(crate) fn other_of<'a>(groups: &'a [Group], members: &Members) -> Option<&'a str> {
    let has = |group: &&Group| group.members.iter().any(|other| other.overlap(members));
    groups.iter().find(has).map(|group| group.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(uid: u32, name: &str) -> Members {
        let beginning = name.strip_suffix('*');
        Members {
            user: User { name: uid.to_string(), uid },
            name: beginning.unwrap_or(name).to_owned(),
            is_beginning: beginning.is_some(),
        }
    }

    #[test]
    fn a_tenant_is_of_the_group_that_its_name_and_user_are_in() {
        let groups = [
            Group { name: "a".into(), members: vec![members(0, "web*"), members(7, "db")] },
            Group { name: "b".into(), members: vec![members(0, "build"), members(7, "web*")] },
        ];
        for (uid, name, group) in [
            (0, "web1", Some("a")),
            (0, "web", Some("a")),
            (7, "web1", Some("b")),
            (7, "db", Some("a")),
            (0, "db", None),
            (7, "db2", None),
            (8, "web1", None),
        ] {
            assert_eq!(of(&groups, uid, name), group, "{uid}:{name}");
        }
        for (uid, name, group) in [
            (0, "we*", Some("a")),
            (0, "web12*", Some("a")),
            (0, "website", Some("a")),
            (7, "d*", Some("a")),
            (0, "*", Some("a")),
            (8, "*", None),
            (0, "w", None),
        ] {
            assert_eq!(other_of(&groups, &members(uid, name)), group, "{uid}:{name}");
        }
    }
}
